"""Translation as a local page and service: models, a queue with one worker, and the HTTP application around them."""
