"""The words of the built-in corpus in English and German: months, people, goods, events and places; numbers, ordinals
of the days of a month, and years."""

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


LARGEST = 999_999

_EN = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen"""
_DE = """null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn
sechzehn siebzehn achtzehn neunzehn"""
_EN_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_DE_TENS = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig"

EN_SMALL = _EN.split()
DE_SMALL = _DE.split()
EN_TENS = dict(enumerate(_EN_TENS.split(), start=2))
DE_TENS = dict(enumerate(_DE_TENS.split(), start=2))

EN_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
DE_ORDINALS = {1: "erst", 3: "dritt", 7: "siebt", 8: "acht"}


def english_number(number: int) -> str:
    """Spell a cardinal number, 0 to 999,999, in the British style: `two thousand and five`."""
    _check_number(number)
    if number < 20:
        return EN_SMALL[number]
    if number < 100:
        tens, units = divmod(number, 10)
        return EN_TENS[tens] + (f"-{EN_SMALL[units]}" if units else "")
    size, name = (100, "hundred") if number < 1_000 else (1_000, "thousand")
    count, rest = divmod(number, size)
    front = f"{english_number(count)} {name}"
    if rest == 0:
        return front
    if rest < 100:  # "two thousand and five", but "two thousand one hundred"
        return f"{front} and {english_number(rest)}"
    return f"{front} {english_number(rest)}"


def german_number(number: int) -> str:
    """Spell a cardinal number as in counting, where a final 1 is `eins`: `einundzwanzigtausendeins` is 21,001."""
    stem = german_stem(number)
    if number % 100 == 1:  # 1, 101 and 2,001, but neither 11 nor 21, in which one is not the last element
        return stem + "s"
    return stem


def german_stem(number: int) -> str:
    """Spell a number as the first element of a compound, where 1 is `ein`."""
    _check_number(number)
    if number == 1:
        return "ein"
    if number < 20:
        return DE_SMALL[number]
    if number < 100:
        tens, units = divmod(number, 10)
        if not units:
            return DE_TENS[tens]
        return f"{german_stem(units)}und{DE_TENS[tens]}"  # units before tens
    size, name = (100, "hundert") if number < 1_000 else (1_000, "tausend")
    count, rest = divmod(number, size)
    return german_stem(count) + name + (german_stem(rest) if rest else "")


def _check_number(number: int) -> None:
    if not 0 <= number <= LARGEST:
        raise ValueError(f"number words go from 0 to {LARGEST:,}, got {number:,}")


def english_ordinal(day: int) -> str:
    """Spell the ordinal of a day of the month, `first` to `thirty-first`."""
    front, dash, last = english_number(day).rpartition("-")  # of twenty-one only `one` changes
    regular = f"{last}th"
    if last.endswith("y"):
        regular = f"{last[:-1]}ieth"
    return front + dash + EN_ORDINALS.get(last, regular)


def german_ordinal(day: int, ending: str) -> str:
    """Spell the ordinal of a day of the month with its ending: `erste` to `einunddreißigste`, or `ersten`."""
    if day in DE_ORDINALS:
        return DE_ORDINALS[day] + ending
    if day < 20:
        return f"{german_number(day)}t{ending}"
    return f"{german_number(day)}st{ending}"


def english_year(year: int) -> str:
    """Spell a year, 1100 to 2099, as it is read: `nineteen oh five`, `two thousand and five`, `twenty ten`."""
    century, rest = divmod(year, 100)
    if century == 20 and rest < 10:  # nobody says "twenty oh five"
        return english_number(year)
    last = english_number(rest)
    if rest < 10:
        last = f"oh {last}" if rest else "hundred"
    return f"{english_number(century)} {last}"


def german_year(year: int) -> str:
    """Spell a year: `neunzehnhundertvierundachtzig` before 2000, `zweitausendfünf` from then on."""
    century, rest = divmod(year, 100)
    if century >= 20:
        return german_number(year)
    return f"{german_number(century)}hundert{german_number(rest) if rest else ''}"
