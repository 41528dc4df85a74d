"""A generated English-German corpus: sentences with number words, dates, clock times and prices.

It needs no download and no licence, is unlimited, and has exactly one correct translation of every sentence in either
direction, so that exact match measures how much of the language a model has learned. The model must learn some German
grammar: units before tens (`dreiundzwanzig`), half hours named after the next hour (`halb acht`), case (`der dritte
Mai`, `am dritten Mai`), gender (`der rote Tisch`, `den roten Tisch`), and verbs that move to the second position or are
separated (`Am Montag fährt der Zug um acht Uhr ab.`).
"""

from __future__ import annotations

import datetime
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from recipes.translation.data import builtin_words as words
from recipes.translation.data.builtin_words import (
    english_number,
    english_ordinal,
    english_year,
    german_number,
    german_ordinal,
    german_stem,
    german_year,
)
from recipes.translation.text.pair import Pair, Split


def clock(hour: int, minute: int) -> Pair:
    """Spell a time on the twelve-hour clock (hour 1 to 12), as used after `at` and `um`."""
    following = hour % 12 + 1
    if minute == 0:
        return Pair(f"{english_number(hour)} o'clock", f"{german_stem(hour)} Uhr")
    if minute == 30:  # German names the hour that is half over: half past seven is halb acht
        return Pair(f"half past {english_number(hour)}", f"halb {german_number(following)}")
    relation = Pair("past", "nach")
    if minute > 30:  # counted back from the next hour
        relation = Pair("to", "vor")
        hour = following
        minute = 60 - minute
    amount = Pair("a quarter", "Viertel")
    if minute != 15:
        amount = _amount(minute, "minute", "minutes", "eine Minute", "Minuten")
    return Pair(
        f"{amount.source} {relation.source} {english_number(hour)}",
        f"{amount.target} {relation.target} {german_number(hour)}",
    )


def price(euros: int, cents: int) -> Pair:
    """Spell an amount of money as the object of a verb: `one euro and five cents`, `einen Euro und fünf Cent`."""
    amounts = []
    if euros:
        amounts.append(_amount(euros, "euro", "euros", "einen Euro", "Euro"))
    if cents:
        amounts.append(_amount(cents, "cent", "cents", "einen Cent", "Cent"))
    return _join(amounts)


def _join(amounts: Sequence[Pair]) -> Pair:
    return Pair(" and ".join(each.source for each in amounts), " und ".join(each.target for each in amounts))


def _amount(number: int, one: str, many: str, de_one: str, de_many: str) -> Pair:
    """Spell a number with its noun; `de_one` includes the article, which depends on gender and case."""
    if number == 1:
        return Pair(f"one {one}", de_one)
    return Pair(f"{english_number(number)} {many}", f"{german_number(number)} {de_many}")


def _one_accusative(noun: words.Noun) -> str:
    return {"der": "einen", "die": "eine", "das": "ein"}[noun.article] + " " + noun.de


# Random draws. Only Random.random() is guaranteed not to change across Python versions, so they use nothing else.

T = TypeVar("T")


def _below(rng: random.Random, bound: int) -> int:
    return int(rng.random() * bound)


def _pick(rng: random.Random, items: Sequence[T]) -> T:
    return items[_below(rng, len(items))]


def _number(rng: random.Random, digits: int) -> int:
    """Draw a number of up to `digits` digits, every length equally likely."""
    length = 1 + _below(rng, digits)
    low = 0
    if length > 1:
        low = 10 ** (length - 1)
    return low + _below(rng, 10**length - low)


def _count(rng: random.Random, digits: int) -> int:
    """Draw a number before a noun; 1 is the only one that ends in 01, since German usage for 101 trees varies."""
    while True:
        number = _number(rng, digits)
        if number == 1 or (number and number % 100 != 1):
            return number


def _date(rng: random.Random) -> datetime.date:
    """Draw a day of 1800 to 2024; the year determines the weekday."""
    first = datetime.date(1800, 1, 1).toordinal()
    return datetime.date.fromordinal(first + _below(rng, datetime.date(2025, 1, 1).toordinal() - first))


def _day(date: datetime.date, ending: str) -> Pair:
    en, de = words.MONTHS[date.month - 1]
    return Pair(f"{english_ordinal(date.day)} of {en}", f"{german_ordinal(date.day, ending)} {de}")


def _time(rng: random.Random) -> Pair:
    hour = 1 + _below(rng, 12)
    # Quarter hours are four minutes of sixty, but are named more often
    if rng.random() < 0.3:
        return clock(hour, 15 * _below(rng, 4))
    return clock(hour, _below(rng, 60))


def _price(rng: random.Random) -> Pair:
    cents = 0
    if rng.random() < 0.6:
        cents = 1 + _below(rng, 99)
    return price(_count(rng, 4), cents)


def _sentence(en: str, de: str) -> Pair:
    return Pair(en[0].upper() + en[1:], de[0].upper() + de[1:])


# Sentence frames: each function draws a sentence in both languages.


def _plain_number(rng: random.Random) -> Pair:
    number = _number(rng, 6)
    return _sentence(f"the number is {english_number(number)}.", f"die Zahl ist {german_number(number)}.")


def _things_in_a_place(rng: random.Random) -> Pair:
    noun, en_many, de_many = _pick(rng, words.COUNTED)
    en_place, de_place = _pick(rng, words.PLACES)
    number = _count(rng, 6)
    en, de = _amount(number, noun.en, en_many, _one_accusative(noun), de_many)
    verb = "are"
    if number == 1:
        verb = "is"
    return _sentence(f"there {verb} {en} {en_place}.", f"{de_place} gibt es {de}.")


def _age(rng: random.Random) -> Pair:
    en_person, de_person = _pick(rng, words.PEOPLE)
    en, de = _amount(1 + _below(rng, 100), "year", "years", "ein Jahr", "Jahre")
    return _sentence(f"{en_person} is {en} old.", f"{de_person} ist {de} alt.")


def _birth(rng: random.Random) -> Pair:
    en_person, de_person = _pick(rng, words.PEOPLE)
    date = _date(rng)
    en, de = _day(date, "en")
    en = f"{en} {english_year(date.year)}"
    de = f"{de} {german_year(date.year)}"
    if rng.random() < 0.5:
        return _sentence(f"{en_person} was born on the {en}.", f"{de_person} wurde am {de} geboren.")
    en_weekday, de_weekday = words.WEEKDAYS[date.weekday()]
    return _sentence(
        f"{en_person} was born on {en_weekday}, the {en}.",
        f"{de_person} wurde am {de_weekday}, dem {de}, geboren.",
    )


def _today(rng: random.Random) -> Pair:
    date = _date(rng)
    en, de = _day(date, "e")
    en_weekday, de_weekday = words.WEEKDAYS[date.weekday()]
    return _sentence(
        f"today is {en_weekday}, the {en} {english_year(date.year)}.",
        f"heute ist {de_weekday}, der {de} {german_year(date.year)}.",
    )


def _event_on_a_day(rng: random.Random) -> Pair:
    event = _pick(rng, words.EVENTS)
    en, de = _day(_date(rng), "en")
    return _sentence(f"{event.source} takes place on the {en}.", f"{event.target} findet am {de} statt.")


def _event_at_a_time(rng: random.Random) -> Pair:
    event = _pick(rng, words.EVENTS)
    en, de = _time(rng)
    return _on_weekday(rng, event, f"begins at {en}.", "beginnt", f"um {de}.")


def _departure(rng: random.Random) -> Pair:
    vehicle = _pick(rng, words.VEHICLES)
    en_city, de_city = _pick(rng, words.CITIES)
    en, de = _time(rng)
    subject = Pair(f"{vehicle.source} to {en_city}", f"{vehicle.target} nach {de_city}")
    return _on_weekday(rng, subject, f"leaves at {en}.", "fährt", f"um {de} ab.")


def _on_weekday(rng: random.Random, subject: Pair, predicate: str, verb: str, rest: str) -> Pair:
    """Begin half of the sentences with a weekday, after which the German verb precedes its subject."""
    if rng.random() < 0.5:
        return _sentence(f"{subject.source} {predicate}", f"{subject.target} {verb} {rest}")
    en, de = _pick(rng, words.WEEKDAYS)
    return _sentence(f"on {en} {subject.source} {predicate}", f"am {de} {verb} {subject.target} {rest}")


def _it_is(rng: random.Random) -> Pair:
    en, de = _time(rng)
    return _sentence(f"it is {en}.", f"es ist {de}.")


def _cost(rng: random.Random) -> Pair:
    en_colour, de_colour = _pick(rng, words.COLOURS)
    thing = _pick(rng, words.GOODS)
    en, de = _price(rng)
    return _sentence(f"the {en_colour} {thing.en} costs {en}.", f"{thing.article} {de_colour}e {thing.de} kostet {de}.")


def _payment(rng: random.Random) -> Pair:
    en_person, de_person = _pick(rng, words.PEOPLE)
    en_colour, de_colour = _pick(rng, words.COLOURS)
    thing = _pick(rng, words.GOODS)
    en, de = _price(rng)
    bought = f"{thing.article} {de_colour}e {thing.de}"
    if thing.article == "der":  # the only gender whose accusative differs: den roten Tisch, die rote Lampe
        bought = f"den {de_colour}en {thing.de}"
    return _sentence(
        f"{en_person} paid {en} for the {en_colour} {thing.en}.",
        f"{de_person} hat {de} für {bought} bezahlt.",
    )


def _journey(rng: random.Random) -> Pair:
    en_city, de_city = _pick(rng, words.CITIES)
    amounts = [_amount(1 + _below(rng, 23), "hour", "hours", "eine Stunde", "Stunden")]
    if rng.random() < 0.7:
        amounts.append(_amount(1 + _below(rng, 59), "minute", "minutes", "eine Minute", "Minuten"))
    en, de = _join(amounts)
    return _sentence(f"the journey to {en_city} takes {en}.", f"die Reise nach {de_city} dauert {de}.")


def _distance(rng: random.Random) -> Pair:
    en_city, de_city = _pick(rng, words.CITIES)
    en, de = _amount(_count(rng, 4), "kilometre", "kilometres", "einen Kilometer", "Kilometer")
    return _sentence(f"the road to {en_city} is {en} long.", f"die Straße nach {de_city} ist {de} lang.")


# Frames with many different sentences are listed twice, so that they are drawn twice as often.
FRAMES: tuple[Callable[[random.Random], Pair], ...] = (
    *(_age, _it_is, _event_on_a_day, _journey, _distance),
    *(_plain_number, _things_in_a_place, _birth, _today, _event_at_a_time, _departure, _cost, _payment) * 2,
)


def split_of(source: str) -> Split:
    """Return the split of an English sentence, which depends only on its text: valid and test get a twentieth each.

    The grammar translates one to one, so that each German sentence is in only one split, too.
    """
    # SHA-256, since Python's own hash of a text differs from process to process
    bucket = int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "big") % 20
    if bucket == 0:
        return "valid"
    if bucket == 1:
        return "test"
    return "train"


def pairs(count: int, seed: int, split: Split = "train") -> list[Pair]:
    """Draw `count` English-German pairs of a split, the same on every machine.

    A longer list starts with the shorter ones of the same seed. No sentence is in two splits, whatever the seeds. The
    pairs of `valid` and `test` are all different; `train` repeats short sentences, as real text does.
    """
    return list(each_pair(count, seed, split))


def each_pair(count: int, seed: int, split: Split = "train") -> Iterator[Pair]:
    """Yield the pairs that `pairs` returns, one by one."""
    if split not in ("train", "valid", "test"):
        raise ValueError(f"split is train, valid or test, got {split!r}")
    rng = random.Random(seed)
    drawn = 0
    seen: set[Pair] = set()
    while drawn < count:
        pair = _pick(rng, FRAMES)(rng)
        # All splits are drawn from one stream of sentences, which does not depend on the number of pairs
        if split_of(pair.source) != split or pair in seen:
            continue
        if split != "train":
            seen.add(pair)
        drawn += 1
        yield pair
