"""The built-in corpus: its German and English are right, and its splits are honest."""

import hashlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.data.builtin_corpus import clock, pairs, price, split_of
from recipes.translation.data.builtin_words import (
    english_number,
    english_ordinal,
    english_year,
    german_number,
    german_ordinal,
    german_year,
)
from recipes.translation.text.pair import Pair

NUMBERS = [
    (0, "zero", "null"),
    (1, "one", "eins"),
    (6, "six", "sechs"),
    (7, "seven", "sieben"),
    (11, "eleven", "elf"),
    (12, "twelve", "zwölf"),
    (13, "thirteen", "dreizehn"),
    (16, "sixteen", "sechzehn"),
    (17, "seventeen", "siebzehn"),
    (18, "eighteen", "achtzehn"),
    (20, "twenty", "zwanzig"),
    (21, "twenty-one", "einundzwanzig"),
    (23, "twenty-three", "dreiundzwanzig"),
    (30, "thirty", "dreißig"),
    (31, "thirty-one", "einunddreißig"),
    (40, "forty", "vierzig"),
    (55, "fifty-five", "fünfundfünfzig"),
    (66, "sixty-six", "sechsundsechzig"),
    (77, "seventy-seven", "siebenundsiebzig"),
    (99, "ninety-nine", "neunundneunzig"),
    (100, "one hundred", "einhundert"),
    (101, "one hundred and one", "einhunderteins"),
    (105, "one hundred and five", "einhundertfünf"),
    (117, "one hundred and seventeen", "einhundertsiebzehn"),
    (230, "two hundred and thirty", "zweihundertdreißig"),
    (999, "nine hundred and ninety-nine", "neunhundertneunundneunzig"),
    (1_000, "one thousand", "eintausend"),
    (1_001, "one thousand and one", "eintausendeins"),
    (1_100, "one thousand one hundred", "eintausendeinhundert"),
    (2_016, "two thousand and sixteen", "zweitausendsechzehn"),
    (7_041, "seven thousand and forty-one", "siebentausendeinundvierzig"),
    (21_000, "twenty-one thousand", "einundzwanzigtausend"),
    (21_021, "twenty-one thousand and twenty-one", "einundzwanzigtausendeinundzwanzig"),
    (100_000, "one hundred thousand", "einhunderttausend"),
    (101_000, "one hundred and one thousand", "einhunderteintausend"),
    (
        123_456,
        "one hundred and twenty-three thousand four hundred and fifty-six",
        "einhundertdreiundzwanzigtausendvierhundertsechsundfünfzig",
    ),
    (
        999_999,
        "nine hundred and ninety-nine thousand nine hundred and ninety-nine",
        "neunhundertneunundneunzigtausendneunhundertneunundneunzig",
    ),
]

TIMES = [
    (1, 0, "one o'clock", "ein Uhr"),
    (7, 0, "seven o'clock", "sieben Uhr"),
    (4, 23, "twenty-three minutes past four", "dreiundzwanzig Minuten nach vier"),
    (1, 1, "one minute past one", "eine Minute nach eins"),
    (7, 15, "a quarter past seven", "Viertel nach sieben"),
    (7, 30, "half past seven", "halb acht"),
    (12, 30, "half past twelve", "halb eins"),
    (8, 45, "a quarter to nine", "Viertel vor neun"),
    (12, 45, "a quarter to one", "Viertel vor eins"),
    (11, 59, "one minute to twelve", "eine Minute vor zwölf"),
    (5, 31, "twenty-nine minutes to six", "neunundzwanzig Minuten vor sechs"),
]

ORDINALS = [
    (1, "first", "erste"),
    (2, "second", "zweite"),
    (3, "third", "dritte"),
    (5, "fifth", "fünfte"),
    (7, "seventh", "siebte"),
    (8, "eighth", "achte"),
    (9, "ninth", "neunte"),
    (12, "twelfth", "zwölfte"),
    (16, "sixteenth", "sechzehnte"),
    (17, "seventeenth", "siebzehnte"),
    (19, "nineteenth", "neunzehnte"),
    (20, "twentieth", "zwanzigste"),
    (21, "twenty-first", "einundzwanzigste"),
    (23, "twenty-third", "dreiundzwanzigste"),
    (30, "thirtieth", "dreißigste"),
    (31, "thirty-first", "einunddreißigste"),
]

YEARS = [
    (1800, "eighteen hundred", "achtzehnhundert"),
    (1905, "nineteen oh five", "neunzehnhundertfünf"),
    (1917, "nineteen seventeen", "neunzehnhundertsiebzehn"),
    (1984, "nineteen eighty-four", "neunzehnhundertvierundachtzig"),
    (2000, "two thousand", "zweitausend"),
    (2001, "two thousand and one", "zweitausendeins"),
    (2010, "twenty ten", "zweitausendzehn"),
    (2024, "twenty twenty-four", "zweitausendvierundzwanzig"),
]

PRICES = [
    (4, 20, "four euros and twenty cents", "vier Euro und zwanzig Cent"),
    (1, 0, "one euro", "einen Euro"),
    (1, 1, "one euro and one cent", "einen Euro und einen Cent"),
    (0, 99, "ninety-nine cents", "neunundneunzig Cent"),
    (17, 21, "seventeen euros and twenty-one cents", "siebzehn Euro und einundzwanzig Cent"),
]

# One or more of every frame, read and approved by hand: case, gender, agreement, word order, calendar.
SENTENCES = [
    ("The number is zero.", "Die Zahl ist null."),
    (
        "The number is eight hundred and one thousand one hundred and nine.",
        "Die Zahl ist achthunderteintausendeinhundertneun.",
    ),
    ("There is one tree in the village.", "Im Dorf gibt es einen Baum."),
    ("There is one lamp at the station.", "Am Bahnhof gibt es eine Lampe."),
    ("There are nine letters in the library.", "In der Bibliothek gibt es neun Briefe."),
    ("His child is one year old.", "Sein Kind ist ein Jahr alt."),
    ("The concert takes place on the third of February.", "Das Konzert findet am dritten Februar statt."),
    (
        "His child was born on the seventh of June nineteen ninety-three.",
        "Sein Kind wurde am siebten Juni neunzehnhundertdreiundneunzig geboren.",
    ),
    (
        "The teacher was born on Thursday, the seventeenth of December twenty fifteen.",
        "Der Lehrer wurde am Donnerstag, dem siebzehnten Dezember zweitausendfünfzehn, geboren.",
    ),
    (
        "Today is Friday, the first of June nineteen forty-five.",
        "Heute ist Freitag, der erste Juni neunzehnhundertfünfundvierzig.",
    ),
    (
        "Today is Wednesday, the fifth of September two thousand and one.",
        "Heute ist Mittwoch, der fünfte September zweitausendeins.",
    ),
    ("It is a quarter to one.", "Es ist Viertel vor eins."),
    ("The exam begins at half past twelve.", "Die Prüfung beginnt um halb eins."),
    ("On Sunday the lecture begins at half past five.", "Am Sonntag beginnt der Vortrag um halb sechs."),
    ("The bus to Hamburg leaves at one o'clock.", "Der Bus nach Hamburg fährt um ein Uhr ab."),
    (
        "On Monday the ferry to Zurich leaves at a quarter past one.",
        "Am Montag fährt die Fähre nach Zürich um Viertel nach eins ab.",
    ),
    ("The yellow picture costs one euro.", "Das gelbe Bild kostet einen Euro."),
    ("The white book costs one euro and eighteen cents.", "Das weiße Buch kostet einen Euro und achtzehn Cent."),
    (
        "My sister paid eighty-nine euros and seventy-one cents for the red coat.",
        "Meine Schwester hat neunundachtzig Euro und einundsiebzig Cent für den roten Mantel bezahlt.",
    ),
    (
        "She paid six hundred and sixty-one euros and three cents for the black jacket.",
        "Sie hat sechshunderteinundsechzig Euro und drei Cent für die schwarze Jacke bezahlt.",
    ),
    (
        "My sister paid sixty-two euros for the brown book.",
        "Meine Schwester hat zweiundsechzig Euro für das braune Buch bezahlt.",
    ),
    (
        "The journey to Berlin takes fourteen hours and one minute.",
        "Die Reise nach Berlin dauert vierzehn Stunden und eine Minute.",
    ),
    (
        "The journey to Hamburg takes one hour and twenty-three minutes.",
        "Die Reise nach Hamburg dauert eine Stunde und dreiundzwanzig Minuten.",
    ),
    (
        "The road to Prague is five hundred and seventy-one kilometres long.",
        "Die Straße nach Prag ist fünfhunderteinundsiebzig Kilometer lang.",
    ),
]


PINNED = "0fafbd35cb87b8d1208f98124628823cc3910acadfb12ad123efbed16fda3fff"
"""SHA-256 of the first hundred pairs of each split: it may only change with the language itself."""


@pytest.fixture(scope="module")
def sample() -> list[Pair]:
    return pairs(6_000, seed=5)


@pytest.mark.parametrize(("number", "english", "german"), NUMBERS)
def test_number_words_are_right(number: int, english: str, german: str) -> None:
    assert (english_number(number), german_number(number)) == (english, german)


@pytest.mark.parametrize(("hour", "minute", "english", "german"), TIMES)
def test_clock_times_are_right(hour: int, minute: int, english: str, german: str) -> None:
    assert clock(hour, minute) == Pair(english, german)


@pytest.mark.parametrize(("day", "english", "german"), ORDINALS)
def test_ordinals_are_right(day: int, english: str, german: str) -> None:
    assert (english_ordinal(day), german_ordinal(day, "e"), german_ordinal(day, "en")) == (
        english,
        german,
        german + "n",
    )


@pytest.mark.parametrize(("year", "english", "german"), YEARS)
def test_years_are_right(year: int, english: str, german: str) -> None:
    assert (english_year(year), german_year(year)) == (english, german)


@pytest.mark.parametrize(("euros", "cents", "english", "german"), PRICES)
def test_prices_are_right(euros: int, cents: int, english: str, german: str) -> None:
    assert price(euros, cents) == Pair(english, german)


@pytest.mark.parametrize(("english", "german"), SENTENCES)
def test_sentences_are_right(sample: list[Pair], english: str, german: str) -> None:
    assert dict(sample)[english] == german


def test_number_words_differ_for_all_numbers_below_100_000() -> None:
    numbers = range(100_000)
    assert (
        len({english_number(number) for number in numbers})
        == len({german_number(number) for number in numbers})
        == 100_000
    )


@given(st.integers(max_value=-1) | st.integers(min_value=1_000_000))
def test_numbers_without_words_are_refused(number: int) -> None:
    for words in (english_number, german_number):
        with pytest.raises(ValueError, match="0 to 999,999"):
            words(number)


def test_translation_is_one_to_one() -> None:
    everything = set(pairs(30_000, seed=5)) | set(pairs(500, 5, "valid")) | set(pairs(500, 5, "test"))
    assert len({pair.source for pair in everything}) == len({pair.target for pair in everything}) == len(everything)


def test_splits_share_no_sentence_on_either_side_whatever_the_seed() -> None:
    splits = [
        pairs(15_000, 1, "train") + pairs(10_000, 2, "train"),
        pairs(500, 1, "valid") + pairs(500, 3, "valid"),
        pairs(500, 1, "test") + pairs(500, 4, "test"),
    ]
    for side in (0, 1):
        train, valid, test = ({pair[side] for pair in split} for split in splits)
        assert not train & valid
        assert not train & test
        assert not valid & test


@pytest.mark.parametrize("split", ["valid", "test"])
def test_held_out_pairs_stand_once(split: str) -> None:
    drawn = pairs(1_000, 1, split)
    assert len(set(drawn)) == len(drawn) == 1_000


def test_each_held_out_split_is_a_twentieth_of_the_language() -> None:
    shares = [sum(split_of(f"{number}") == split for number in range(20_000)) / 20_000 for split in ("valid", "test")]
    assert shares == pytest.approx([0.05, 0.05], abs=0.01)


def test_training_text_is_too_varied_to_memorise() -> None:
    assert len(set(pairs(40_000, seed=1))) > 30_000


def test_the_first_pairs_are_pinned() -> None:
    text = "\n".join("\t".join(pair) for split in ("train", "valid", "test") for pair in pairs(100, 1, split))
    assert hashlib.sha256(text.encode()).hexdigest() == PINNED


def test_pairs_are_the_same_in_another_process() -> None:
    code = (
        "import hashlib; from recipes.translation.data.builtin_corpus import pairs;"
        "print(hashlib.sha256(repr([tuple(p) for p in pairs(500, 7)]).encode()).hexdigest())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "12345"}, capture_output=True, text=True, check=True
    )
    here = hashlib.sha256(repr([tuple(pair) for pair in pairs(500, 7)]).encode()).hexdigest()
    assert other.stdout.strip() == here


def test_a_longer_corpus_starts_with_the_shorter_one() -> None:
    assert pairs(200, 3)[:50] == pairs(50, 3)


def test_seeds_differ() -> None:
    assert pairs(50, 3) != pairs(50, 4)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="dev"):
        pairs(1, 1, "dev")
