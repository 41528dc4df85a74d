"""The words of the built-in corpus: months, people, goods, events and places, in English and German."""

from __future__ import annotations

from typing import NamedTuple

from recipes.translation.text.pair import Pair


class Noun(NamedTuple):
    """An English noun, the German one, and the German definite article, which indicates the gender."""

    en: str
    de: str
    article: str = "der"


_EN_MONTHS = "January February March April May June July August September October November December"
_DE_MONTHS = "Januar Februar März April Mai Juni Juli August September Oktober November Dezember"
MONTHS = tuple(zip(_EN_MONTHS.split(), _DE_MONTHS.split(), strict=True))
WEEKDAYS = (
    ("Monday", "Montag"),
    ("Tuesday", "Dienstag"),
    ("Wednesday", "Mittwoch"),
    ("Thursday", "Donnerstag"),
    ("Friday", "Freitag"),
    ("Saturday", "Samstag"),
    ("Sunday", "Sonntag"),
)
PEOPLE = (
    ("he", "er"),
    ("she", "sie"),
    ("my brother", "mein Bruder"),
    ("my sister", "meine Schwester"),
    ("our neighbour", "unser Nachbar"),
    ("her daughter", "ihre Tochter"),
    ("his child", "sein Kind"),
    ("the teacher", "der Lehrer"),
)
CITIES = (
    ("Berlin", "Berlin"),
    ("Hamburg", "Hamburg"),
    ("Vienna", "Wien"),
    ("Munich", "München"),
    ("Cologne", "Köln"),
    ("Zurich", "Zürich"),
    ("Rome", "Rom"),
    ("Prague", "Prag"),
)
COLOURS = (
    ("red", "rot"),
    ("blue", "blau"),
    ("green", "grün"),
    ("black", "schwarz"),
    ("white", "weiß"),
    ("brown", "braun"),
    ("grey", "grau"),
    ("yellow", "gelb"),
)
GOODS = (
    Noun("table", "Tisch"),
    Noun("lamp", "Lampe", "die"),
    Noun("book", "Buch", "das"),
    Noun("chair", "Stuhl"),
    Noun("bag", "Tasche", "die"),
    Noun("picture", "Bild", "das"),
    Noun("coat", "Mantel"),
    Noun("jacket", "Jacke", "die"),
    Noun("bicycle", "Fahrrad", "das"),
)
EVENTS = (
    Pair("the concert", "das Konzert"),
    Pair("the meeting", "die Sitzung"),
    Pair("the exam", "die Prüfung"),
    Pair("the lecture", "der Vortrag"),
    Pair("the match", "das Spiel"),
    Pair("the course", "der Kurs"),
)
VEHICLES = (
    Pair("the train", "der Zug"),
    Pair("the bus", "der Bus"),
    Pair("the ferry", "die Fähre"),
    Pair("the ship", "das Schiff"),
)
# What can be counted: singular with its article, then the plural of both languages.
COUNTED = (
    (Noun("tree", "Baum"), "trees", "Bäume"),
    (Noun("lamp", "Lampe", "die"), "lamps", "Lampen"),
    (Noun("book", "Buch", "das"), "books", "Bücher"),
    (Noun("chair", "Stuhl"), "chairs", "Stühle"),
    (Noun("window", "Fenster", "das"), "windows", "Fenster"),
    (Noun("letter", "Brief"), "letters", "Briefe"),
)
PLACES = (
    ("in the library", "in der Bibliothek"),
    ("in the village", "im Dorf"),
    ("in the city", "in der Stadt"),
    ("in the castle", "im Schloss"),
    ("in the house", "im Haus"),
    ("at the station", "am Bahnhof"),
)
