"""The command line as a person meets it: help, mistakes, and commands that work as printed."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.translation.commands import COMMANDS, main
from recipes.translation.commands.translation import typed_sentences
from recipes.translation.errors import OtherRankError
from recipes.translation.run_folder.checkpoint import load_translator, save_model
from recipes.translation.scores.rerank import best_by_mbr
from recipes.translation.settings.config import SCHEMA, load_config
from recipes.translation.translating.alignments import align, pharaoh
from recipes.translation.translating.translate import translate
from tests.recipes.command_line import SENTENCE, refusal, run_main
from tests.recipes.random_translator import random_translator
from tests.recipes.saved import saved_file
from tests.recipes.tiny import LEARNS, SETTINGS, options, tiny


def test_an_error_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes share the output: a line written in two pieces could be split by that of the other one."""
    pieces: list[bytes] = []

    class Unbuffered(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, piece: Any) -> int:
            pieces.append(bytes(piece))
            return len(piece)

    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(Unbuffered(), write_through=True))
    assert run_main("walk") == 2
    written = [piece for piece in pieces if piece]
    assert len(written) == 1
    assert written[0].startswith(b"error: ")
    assert written[0].endswith(b"\n")


def test_an_output_that_cannot_take_a_letter_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        assert run_main("prepare", *options(tmp_path / "Übung")) == 2
    advice = "set PYTHONIOENCODING=utf-8"
    assert capsys.readouterr().err == f"error: the output's encoding, ascii, has no 'Ü': {advice}\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", *options(folder, LEARNS)]) == 0
    return folder


def test_without_a_command_every_command_is_listed_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main() == run_main("--help") == 0
    text = capsys.readouterr().out
    for name, function in COMMANDS.items():
        assert f"  {name}" in text
        assert (function.__doc__ or "").splitlines()[0] in text
        assert f"\n    {'':{max(map(len, COMMANDS))}}  python -m recipes.translation {name}" in text, name


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help_says_what_a_command_does_with_an_example_and_every_default(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(command, "--help") == 0
    text = capsys.readouterr().out
    assert (COMMANDS[command].__doc__ or "").splitlines()[0] in text
    assert f"example:\n  python -m recipes.translation {command}" in text
    _, _, listed = text.partition("options:")
    if command in ("train", "prepare", "demo"):
        for name in SCHEMA.settings:
            _, found, entry = listed.partition(f"  --{name} ")
            assert found, name
            assert "(default: " in " ".join(entry.split("\n  --")[0].split()), name


def default_of(option: str, command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the help of a command says is the default of an option."""
    assert run_main(command, "--help") == 0
    _, _, entry = capsys.readouterr().out.partition("options:")[2].partition(f"  {option} ")
    words = " ".join(entry.split("\n  --")[0].split())
    (default,) = re.findall(r"\(default: (.*?)\)$", words)
    return str(default)


@pytest.mark.parametrize(
    ("command", "option", "default"),
    [
        ("train", "--model.d_model", "that of the preset"),
        ("train", "--model.norm", "that of the preset"),
        ("train", "--training.chunk_tokens", "none"),
        ("train", "--cleaning.max_ratio", "none"),
        ("train", "--training.steps", "1000"),
        ("demo", "--training.steps", "1200"),
        ("demo", "--model.dropout", "0.0"),
        ("translate", "--beam", "the run's own decoding.beam, 4 unless it was set"),
        ("evaluate", "--length-penalty", "the run's own decoding.length_penalty, 0.6 unless it was set"),
    ],
)
def test_the_default_in_the_help_is_the_value_that_the_command_uses(
    command: str, option: str, default: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert default_of(option, command, capsys) == default


def test_every_setting_says_what_it_means() -> None:
    for name, setting in SCHEMA.settings.items():
        assert setting.help, name


def imported(words: list[str], slow: list[str]) -> list[str]:
    """Which of these packages a command has imported when it ends."""
    script = (
        "import sys; from recipes.translation.commands import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        f"print(*[name for name in {slow} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("words", [[], ["train", "--training.stepz", "3"]])
def test_the_list_of_commands_and_mistakes_do_not_wait_for_torch(words: list[str]) -> None:
    assert imported(words, ["torch"]) == []


def test_a_translation_does_not_wait_for_what_only_training_in_parts_needs(tmp_path: Path) -> None:
    """Torch's compiler, FSDP2 and sympy, which take longer to import than all else takes together."""
    run = tmp_path / "run"
    save_model(run / "best", random_translator(tmp_path), {"step": 1})
    slow = ["torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy"]
    assert imported(["translate", "--run", str(run), "a house"], slow) == []


def test_training_does_not_wait_for_the_code_generator(tmp_path: Path) -> None:
    """Torch's optimizers import its compiler, but none of what generates code."""
    words = ["train", *options(tmp_path / "run", {"training.steps": 1})]
    assert imported(words, ["torch._inductor.compile_fx"]) == []


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["trian"], "train"),
        (["train", "--training.stepz", "5"], "--training.steps"),
        (["train", "--steps=5"], "--training.steps"),
        (["train", "--learning-rate", "1"], "--training.learning_rate"),
        (["train", "--fesh"], "--fresh"),
        (["translate", "--beem", "3", "hello"], "--beam"),
        (["evaluate", "--tokenise", "intl"], "--tokenize"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_nearest_valid_one(
    argv: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"did you mean {meant}?" in refusal(capsys, *argv)


@pytest.mark.parametrize(
    ("argv", "answer"),
    [
        (["train", "--training.steps", "many"], "training.steps (command line) expects a whole number"),
        (["train", "--training.steps"], "expected one argument"),
        (["train", "--processes"], "expected one argument: give a number, or auto"),
        (["train", "--config", "nowhere.yaml"], "no configuration file nowhere.yaml"),
        (["train", "--model.preset", "tinny", "--run", "{tmp}"], "model.preset"),
        (["train", "--data.format", "text", "--run", "{tmp}"], "data.train takes two files"),
        (["translate", "--run", "nowhere", "hello"], "no trained model in nowhere/best"),
        (["evaluate", "--run", "nowhere"], "no trained model in nowhere/best"),
        (["translate", "--file", "nowhere.txt"], "nowhere.txt: No such file"),
        (["evaluate", "--hypotheses", "a.txt"], "go together"),
        (
            ["evaluate", "--hypotheses", "a", "--references", "b", "--beam", "7"],
            "--beam is for a model, but --hypotheses",
        ),
        (
            ["evaluate", "--hypotheses", "a", "--references", "b", "--length-norm", "gnmt"],
            "--length-norm is for a model",
        ),
        (
            ["evaluate", "--hypotheses", "a", "--references", "b", "--checkpoint", "best"],
            "--checkpoint is for a model",
        ),
        (["evaluate", "--hypotheses", "a", "--references", "b", "--run", "{tmp}"], "--run is for a model"),
        (["train", "--run", ""], "run is empty, perhaps because a shell variable is not set: name the folder"),
        *[
            (words, "it is empty, perhaps because a shell variable is not set: give a path")
            for words in (
                ["evaluate", "--sources", "", "--references", ""],
                ["translate", "--file", ""],
                ["translate", "--run", "", SENTENCE],
                ["report", "--output", "", "a"],
                ["report", ""],
                ["export", "--to", "hf", "--out", ""],
                ["compare", "", "a"],
            )
        ],
        (["evaluate", "--sources", "a.txt"], "--sources and --references go together"),
        (["evaluate", "--references", "a.txt"], "--references go together with --hypotheses, or with --sources"),
        (["evaluate", "--split", "test", "--sources", "a", "--references", "b"], "give one of them"),
        (["evaluate", "--hypotheses", "a", "--references", "b", "--metric-command", "c"], "name them with --sources"),
        (["translate", SENTENCE, "--mbr", "chrf"], "--mbr chooses among several translations: add --n-best N"),
        (["translate", SENTENCE, "--mbr", "chrf", "--n-best", "4", "--scores"], "without the scores of --scores"),
        (["translate", SENTENCE, "--alignments", "a", "--n-best", "4"], "--alignments is for one translation"),
        (["translate", SENTENCE, "--mbr", "ter"], "invalid choice"),
        (
            ["translate", SENTENCE, "--metric-command", "cat"],
            "--metric-command chooses among several translations",
        ),
        (["translate", SENTENCE, "--mbr", "command", "--n-best", "4"], "needs the program that --metric-command names"),
        (
            ["translate", SENTENCE, "--mbr", "bleu", "--n-best", "4", "--metric-command", "cat"],
            "--mbr bleu does not use --metric-command: leave one of them out",
        ),
        (["evaluate", "--tokenize", "13b"], "no tokeniser '13b'"),
        (["evaluate", "--split", "train"], "invalid choice"),
        (["report", "a", "--run", "b"], "name the runs with --run or without, not both"),
        (["report", *"abc"], "name one run; got 3; the command compare shows the scores of several"),
        (["serve", "a", "--run", "b"], "name the runs with --run or without, not both"),
    ],
)
def test_a_mistake_is_answered_with_one_line(
    argv: list[str], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer in refusal(capsys, *(word.replace("{tmp}", str(tmp_path / "run")) for word in argv))


@pytest.mark.parametrize("command", list(COMMANDS))
def test_torchrun_passes_every_option_on_as_it_is(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from torch.distributed.run import parse_args

    assert run_main(command, "--help") == 0
    names = set(re.findall(r"(?:^ +|, )(--[\w.-]+)", capsys.readouterr().out, re.MULTILINE))
    if command != "compare":  # which takes runs without an option
        assert {"--run", "--folder"} <= names
    assert "--help" in names
    for name in names - {"--run"}:  # which is one of torchrun's own, abbreviated: --folder is for that
        assert parse_args(["-m", "recipes.translation", command, name, "x"]).training_script_args == [
            command,
            name,
            "x",
        ]


@pytest.mark.parametrize(
    ("argv", "answer"),
    [
        (["train", "--training.devices", "nowhere"], "training.devices"),
        (["translate", "hello"], "no trained model in {tmp}/best"),
        (["evaluate"], "no trained model in {tmp}/best"),
        (["prepare", "--data.format", "text"], "data.train"),
        (["demo", "--training.devices", "nowhere"], "training.devices"),
    ],
)
def test_folder_is_another_spelling_of_run(
    argv: list[str], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = argv
    assert run_main(command, "--folder", str(tmp_path / "run"), *rest) == 2
    assert answer.replace("{tmp}", str(tmp_path / "run")) in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "--run", "a\0b"],
        ["prepare", "--folder", "a\0b"],
        ["demo", "--run", "a\0b"],
        ["train", "--config", "a\0b"],
        ["translate", "--run", "a\0b", "hello"],
        ["translate", "--file", "a\0b"],
        ["evaluate", "--run", "a\0b"],
        ["evaluate", "--hypotheses", "a\0b", "--references", "a\0b"],
    ],
)
def test_a_path_with_a_nul_is_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "NUL" in refusal(capsys, *argv)


def test_a_model_without_its_manifest_is_said_to_be_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "best").mkdir(parents=True)
    (tmp_path / "run" / "best" / "model.safetensors").write_bytes(b"")
    for words in (["translate", SENTENCE], ["evaluate"]):
        said = refusal(capsys, *words, "--run", str(tmp_path / "run"))
        assert "best has no manifest.json: it is damaged, or was not written by the recipe" in said


def test_the_program_ends_with_status_2_and_no_traceback() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "recipes.translation", "translate", "--run", "nowhere", "x"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (2, "", 1)


def test_the_command_line_wins_over_yaml_and_yaml_over_defaults(tmp_path: Path) -> None:
    yaml = tmp_path / "config.yaml"
    yaml.write_text("training: {steps: 2, learning_rate: 0.5}\nmodel: {d_ff: 8}\n")
    settings: dict[str, Any] = {**SETTINGS, "run": str(tmp_path / "run"), "training.learning_rate": 0.25}
    for name in ("training.steps", "model.d_ff"):
        del settings[name]
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    assert main(["train", "--config", str(yaml), *words]) == 0
    saved = load_config(saved_file(tmp_path / "run", "best", "config.yaml"))
    assert (saved.training.steps, saved.training.learning_rate, saved.model.d_ff) == (2, 0.25, 8)
    assert saved.training.clip == 1.0


def test_several_values_of_one_setting_stand_after_one_option(tmp_path: Path) -> None:
    words = options(tmp_path / "run", {"training.steps": 1})
    for name in {"--training.devices", "--training.betas"} & set(words):
        del words[words.index(name) : words.index(name) + 2]
    assert main(["train", *words, "--training.devices", "cpu", "cpu", "--training.betas", "0.8", "0.9"]) == 0
    saved = load_config(saved_file(tmp_path / "run", "last", "config.yaml")).training
    assert (saved.devices, saved.betas) == (("cpu", "cpu"), (0.8, 0.9))


def test_a_run_that_was_begun_keeps_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *options(tmp_path / "a", {"training.steps": 2})]) == 0
    (tmp_path / "a").rename(tmp_path / "b")
    assert main(["train", "--run", str(tmp_path / "b"), "--training.steps", "3"]) == 0
    assert "resuming from step 2" in capsys.readouterr().out
    expected = tiny(tmp_path / "b", {"training.steps": 3})
    assert load_config(saved_file(tmp_path / "b", "last", "config.yaml")) == expected


def test_prepare_makes_the_subwords_and_the_ids_says_where_and_makes_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", *options(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.endswith(f" target subwords in {tmp_path / 'run' / 'subwords'}\n")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["data", "subwords"]


@pytest.mark.parametrize("way", ["words", "file", "pipe", "typed"])
def test_sentences_come_from_words_a_file_a_pipe_or_a_person(
    run: Path, way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sentences = [SENTENCE, "The number is six."]
    words: list[str] = []
    if way == "words":
        words = sentences
    elif way == "file":
        (tmp_path / "in.txt").write_text("\n".join(sentences) + "\n")
        words = ["--file", str(tmp_path / "in.txt")]
    elif way == "pipe":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(("\n".join(sentences) + "\n").encode())))
    else:
        typed = iter([*sentences, ""])
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", lambda _: next(typed))
    capsys.readouterr()
    assert main(["translate", "--run", str(run), *words]) == 0
    translator = load_translator(run / "best")
    expected = translate(translator, sentences)
    assert all(expected)
    printed = capsys.readouterr().out.splitlines()
    assert printed == (["Type a sentence and press Enter; an empty line ends."] if way == "typed" else []) + expected


@pytest.mark.parametrize("end", ["", EOFError, KeyboardInterrupt])
def test_typing_ends_with_an_empty_line_ctrl_d_or_ctrl_c(
    end: str | type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([SENTENCE, end])

    def typing(_: str) -> str:
        answer = next(answers)
        if isinstance(answer, str):
            return answer
        raise answer

    monkeypatch.setattr("builtins.input", typing)
    assert list(typed_sentences("> ")) == [SENTENCE]


def test_ctrl_c_ends_a_command_with_130(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(io.BytesIO):
        def read1(self, size: int | None = -1) -> bytes:
            signal.raise_signal(signal.SIGINT)
            return super().read1(size)

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Interrupted()))
    # A program in the background has it ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["translate", "--run", str(run)]) == 130
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("rank", "said"), [("0", "error: rank 1 ended\n"), ("1", "")])
def test_rank_0_alone_says_that_another_rank_has_failed(
    rank: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(_: object) -> int:
        raise OtherRankError("rank 1 ended")

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setitem(COMMANDS, "prepare", lost)
    assert main(["prepare"]) == 2
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize("command", ["prepare", "--help"])
def test_a_reader_that_has_closed_the_pipe_ends_a_command_with_141(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = options(tmp_path / "run") if command == "prepare" else []
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main([command, *words]) == 141
        print("what is printed afterwards goes nowhere", flush=True)
        monkeypatch.undo()


def test_decoding_options_and_the_checkpoint_can_be_chosen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    for words in (["--beam", "3", "--length-penalty", "1"], ["--checkpoint", "last"]):
        assert main(["translate", "--run", str(run), *words, SENTENCE]) == 0
        assert capsys.readouterr().out.strip()
    assert "--beam expects" in refusal(capsys, "translate", "--run", str(run), "--beam", "0", SENTENCE)
    for name in ("wu", "GNMT"):
        said = refusal(capsys, "translate", "--run", str(run), "--length-norm", name, SENTENCE)
        assert "--length-norm" in said
        assert "gnmt, length" in said


def test_a_model_folder_is_a_run_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for folder in (run, run / "best"):
        capsys.readouterr()
        assert main(["translate", "--run", str(folder), SENTENCE]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("command", ["translate", "evaluate", "export"])
def test_where_a_model_folder_is_named_another_checkpoint_is_refused(
    run: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"translate": [SENTENCE], "evaluate": [], "export": ["--to", "safetensors", "--out", str(run / "out")]}
    said = refusal(capsys, command, "--run", str(run / "best"), "--checkpoint", "last", *words[command])
    assert f"{run / 'best'} is the folder of a single model, so --checkpoint last has nothing to choose" in said
    assert not (run / "out").exists()
    if command == "translate":
        assert "has nothing to choose" in refusal(
            capsys, command, "--run", str(run), "--ensemble", str(run / "best"), "--checkpoint", "last", SENTENCE
        )
        assert main([command, "--run", str(run / "last"), "--checkpoint", "last", SENTENCE]) == 0


def test_a_closed_standard_input_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert "there is no standard input: give sentences, or --file" in refusal(capsys, "translate", "--run", str(run))
    assert main(["translate", "--run", str(run), SENTENCE]) == 0


def test_a_command_works_without_standard_error(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python has none in a program that was started with 2>&-."""
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["translate", "--run", str(run), SENTENCE]) == 0
    assert capsys.readouterr().out.strip()
    sys.stderr.close()


def test_results_are_not_printed_to_a_closed_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["translate", SENTENCE]) == 2
    assert "there is no standard output, where translate prints its results" in capsys.readouterr().err


def printed_of_two(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[str], list[str]]:
    """The translations that a command prints of each of two sentences."""
    assert main(list(words)) == 0
    found: tuple[list[str], list[str]] = ([], [])
    for line in capsys.readouterr().out.split("\n")[:-1]:
        number, _, text = line.partition("\t")
        found[int(number) - 1].append(text)
    return found


@pytest.mark.parametrize("utility", ["chrf", "bleu"])
@pytest.mark.parametrize("many", [["--n-best", "5", "--beam", "5"], ["--sample", "7", "--temperature", "2"]])
def test_minimum_bayes_risk_chooses_among_what_is_printed_without_it(
    utility: str, many: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["translate", "--run", str(run), SENTENCE, "The number is six.", *many]
    found = printed_of_two(capsys, *words)
    assert main([*words, "--mbr", utility]) == 0
    best = [texts[best_by_mbr(texts, utility)] for texts in found]
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in best)


@pytest.mark.parametrize("mbr", [(), ("--mbr", "command")])
def test_a_command_chooses_among_what_is_printed_without_it(
    mbr: tuple[str, ...], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the number of the letter e in the translation, less that of its reference where it has one."""
    (tmp_path / "m.py").write_text(
        "import json, sys\nfor line in sys.stdin:\n    row = json.loads(line)\n"
        "    print(row['translation'].count('e') - row.get('reference', '').count('e'))\n"
    )
    words = ["translate", "--run", str(run), SENTENCE, "The number is six.", "--n-best", "5", "--beam", "5"]
    found = printed_of_two(capsys, *words)
    assert main([*words, *mbr, "--metric-command", shlex.join([sys.executable, str(tmp_path / "m.py")])]) == 0
    best = [max(texts, key=lambda text: text.count("e")) for texts in found]
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in best)


def test_alignments_are_written_line_by_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["translate", "--run", str(run), SENTENCE, "", "The number is six.", "--alignments", str(tmp_path / "a")]
    assert main(words) == 0
    texts = capsys.readouterr().out.split("\n")[:-1]
    translator = load_translator(run / "best")
    found = align(translator, [SENTENCE, "", "The number is six."], texts)
    assert [bool(links) for links in found] == [True, False, True]
    assert (tmp_path / "a").read_text() == "".join(f"{pharaoh(links)}\n" for links in found)


def test_the_demo_ends_with_a_command_that_works_and_starts_afresh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.translation.training.summary.is_hopeless", lambda best: False)
    words = options(tmp_path / "demo", {"training.report": True})
    assert main(["demo", *words]) == 0
    first = capsys.readouterr().out
    assert "replaced" not in first
    assert first.count("    -> ") == 3 + 10
    assert "There are no results of the command evaluate yet." not in (tmp_path / "demo" / "report.html").read_text()
    assert "batches per epoch, devices cpu\n" in first
    (line,) = [line for line in first.splitlines() if " translate --run " in line]
    found = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True)
    translator = load_translator(tmp_path / "demo" / "best")
    assert found.stdout.splitlines() == translate(translator, [SENTENCE])

    assert main(["demo", *words]) == 0
    second = capsys.readouterr().out
    assert f"{tmp_path / 'demo'} contains an earlier run, which is now replaced" in second
    assert "going on from" not in second
