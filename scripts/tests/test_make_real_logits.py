"""Tests of make_real_logits with the real model, and of its launcher.

Run in an environment that has scripts/requirements-real.txt and pytest:

    python -m pytest scripts/tests/test_make_real_logits.py
"""

import hashlib
import importlib.util
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

SCRIPTS = Path(__file__).resolve().parents[1]
VOCAB, HIDDEN = 30522, 384
CLS, SEP = 101, 102
NUMPY_DTYPES = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
}
# Half a step of each type, relative to the value.
ROUNDING = {"f32": 0.0, "bf16": 2.0**-9, "f16": 2.0**-11}

# The checkpoint that sentence-transformers published as all-MiniLM-L6-v2.
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

TEXT = (
    "The softmax of a row of logits is a distribution over the vocabulary. "
    "Its cross-entropy with a label is the negative log of that label's share. "
    "Taking the maximum off first keeps the exponentials from overflowing.\n"
)


def load_script() -> ModuleType:
    """Imports the script from its file: scripts/ is not a package."""
    spec = importlib.util.spec_from_file_location(
        "make_real_logits", SCRIPTS / "make_real_logits.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


script = load_script()


class Encoder:
    """The real model and tokenizer, loaded once."""

    def __init__(self) -> None:
        """Loads both from the installed package."""
        folder = script.model_dir()
        self.model = script.load_model(folder)
        self.tokenizer = script.load_tokenizer(folder)

    def similarities(self, left: list[str], right: list[str]) -> F32:
        """Cosines between mean-pooled sentences, [left, right] f32."""
        return self.embed(left) @ self.embed(right).T

    def embed(self, sentences: list[str]) -> F32:
        """Mean-pooled, normalised hidden states, [sentences, D] f32."""
        rows = []
        for sentence in sentences:
            ids = np.array(self.tokenizer.encode(sentence).ids, np.int32)
            assert (ids[0], ids[-1]) == (CLS, SEP)
            pooled = script.encode(self.model, ids).mean(axis=0)
            rows.append(pooled / np.linalg.norm(pooled))
        return np.stack(rows)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    """The real model and tokenizer."""
    return Encoder()


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A text of more than 200 tokens."""
    path = tmp_path / "text.md"
    path.write_text(TEXT * 6, encoding="utf-8")
    return path


def run(*args: object) -> int:
    """Runs the script's command line in this process; returns its exit status."""
    try:
        return int(script.main([str(arg) for arg in args]))
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


def test_weights_are_the_published_ones() -> None:
    """The package's weights are byte for byte those of all-MiniLM-L6-v2."""
    weights = script.model_dir() / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == WEIGHTS_SHA256


def test_related_sentences_are_closer(encoder: Encoder) -> None:
    """Paraphrases are far closer to each other than to another subject."""
    cats = ["A cat is asleep on the sofa.", "The kitten naps on the couch."]
    banks = ["The central bank raised interest rates.", "Borrowing costs went up this quarter."]
    cat_pair = encoder.similarities(cats[:1], cats[1:]).item()
    bank_pair = encoder.similarities(banks[:1], banks[1:]).item()
    across = encoder.similarities(cats, banks).max().item()
    assert min(cat_pair, bank_pair) > across + 0.3


def test_published_similarities(encoder: Encoder) -> None:
    """Cosines equal those in sentence-transformers' documentation, to its four decimals."""
    # Semantic Textual Similarity page.
    got = encoder.similarities(
        ["The new movie is awesome", "The cat sits outside", "A man is playing guitar"],
        ["The dog plays in the garden", "The new movie is so great", "A woman watches TV"],
    )
    want = [[0.0543, 0.8939, -0.0502], [0.2838, -0.0029, 0.1310], [0.2277, -0.0136, -0.0327]]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)

    # Usage page.
    weather = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    got = encoder.similarities(weather, weather)
    want = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_erf() -> None:
    """The table's erf agrees with math.erf over its range, beyond it and at both zeros."""
    x = np.linspace(-6, 6, 50_001, dtype=np.float32)
    want = np.array([math.erf(value) for value in x.tolist()])
    np.testing.assert_allclose(script.erf(x), want, rtol=0, atol=1.2e-7)
    far = script.erf(np.array([-np.inf, -1e30, 1e30, np.inf], np.float32))
    np.testing.assert_array_equal(far, [-1, -1, 1, 1])
    zeros = script.erf(np.array([0.0, -0.0], np.float32))
    np.testing.assert_array_equal(np.signbit(zeros), [False, True])


def test_gelu() -> None:
    """GELU is x times the normal distribution's share below x."""
    x = np.linspace(-8, 8, 10_001, dtype=np.float32)
    want = [value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x.tolist()]
    np.testing.assert_allclose(script.gelu(x), want, rtol=0, atol=1e-6)


def test_softmax_of_large_values() -> None:
    """Softmax neither overflows nor depends on a shift."""
    x = np.array([[0, 1, 2]], np.float32)
    np.testing.assert_allclose(script.softmax(x).sum(), 1, rtol=1e-6)
    np.testing.assert_array_equal(script.softmax(x + np.float32(1e4)), script.softmax(x))


def test_next_token_loss() -> None:
    """Flat logits cost ln V a label; a certain, right one costs nothing; the last row is unused."""
    ids = np.array([4, 2, 0], np.int32)
    logits = np.zeros((3, 8), np.float32)
    logits[2] = np.nan
    assert script.next_token_loss(logits, ids) == pytest.approx(2 * math.log(8))
    logits[0, 2] = 1e4
    assert script.next_token_loss(logits, ids) == pytest.approx(math.log(8))


def test_sequences_go_round_the_text(encoder: Encoder) -> None:
    """Short text repeats from its start across sequences, between [CLS] and [SEP]."""
    got = script.sequences(encoder.tokenizer, np.array([7, 8, 9], np.int32), 2, 6)
    np.testing.assert_array_equal(got, [[CLS, 7, 8, 9, 7, SEP], [CLS, 8, 9, 7, 8, SEP]])
    assert got.dtype == np.int32


def test_special_tokens_in_text_are_text(encoder: Encoder) -> None:
    """A text that names special tokens gets none; one over 128 tokens is neither cut nor padded."""
    ids = script.tokenize(encoder.tokenizer, "[CLS] " * 100 + "[SEP] [PAD]")
    assert not {CLS, SEP, 0} & set(ids.tolist())
    assert len(ids) > 128


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_both_forms_round_trip(
    dtype: str, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both files hold the right tensors, and the logits are hidden x weight^T."""
    logits_file, hidden_file = tmp_path / "new" / "logits.safetensors", tmp_path / "h.safetensors"
    sizes = ("--batch", 2, "--seq-len", 40, "--dtype", dtype)
    assert run(text_file, *sizes, "--out", logits_file) == 0
    assert run(text_file, *sizes, "--out", hidden_file, "--form", "hidden") == 0
    by_logits, by_hidden = load_file(logits_file), load_file(hidden_file)

    assert {name: tensor.shape for name, tensor in by_logits.items()} == {
        "logits": (2, 40, VOCAB),
        "input_ids": (2, 40),
    }
    assert {name: tensor.shape for name, tensor in by_hidden.items()} == {
        "hidden": (2, 40, HIDDEN),
        "weight": (VOCAB, HIDDEN),
        "input_ids": (2, 40),
    }
    for name, tensor in [*by_logits.items(), *by_hidden.items()]:
        assert tensor.dtype == (np.int32 if name == "input_ids" else NUMPY_DTYPES[dtype])

    ids = by_logits["input_ids"]
    np.testing.assert_array_equal(ids, by_hidden["input_ids"])
    assert (ids[:, 0] == CLS).all() and (ids[:, -1] == SEP).all()
    assert not np.isin(ids[:, 1:-1], [0, CLS, SEP]).any()

    logits = by_logits["logits"].astype(np.float64)
    hidden, weight = (by_hidden[name].astype(np.float64) for name in ("hidden", "weight"))
    # Each factor and the product are rounded once; sums of |h||w| bound what the factors' cost.
    scale = np.abs(hidden) @ np.abs(weight).T
    error = np.abs(logits - hidden @ weight.T)
    assert (error <= (3 * ROUNDING[dtype] + 1e-5) * scale + 1e-6).all()

    # The summaries' losses are those of the tensors as written.
    summaries = capsys.readouterr().out.splitlines()
    for summary, values in zip(summaries, [logits, hidden @ weight.T], strict=True):
        assert float(summary.rsplit(maxsplit=1)[1]) == pytest.approx(
            mean_loss(values, ids), abs=2e-4
        )


def mean_loss(logits: npt.NDArray[np.float64], ids: I32) -> float:
    """Mean next-token loss of logits [B, S, V] f64 with ids [B, S], by its plain definition."""
    log_sum = np.log(np.exp(logits[:, :-1]).sum(axis=-1))
    picked = np.take_along_axis(logits[:, :-1], ids[:, 1:, None], axis=-1)[..., 0]
    return float((log_sum - picked).mean())


def test_hidden_states_are_the_encoders(encoder: Encoder, text_file: Path, tmp_path: Path) -> None:
    """The f32 file holds the encoder's own output and the checkpoint's own embeddings."""
    out = tmp_path / "out.safetensors"
    sizes = ("--batch", 2, "--seq-len", 20, "--dtype", "f32")
    assert run(text_file, *sizes, "--form", "hidden", "--out", out) == 0
    got = load_file(out)
    want = np.stack([script.encode(encoder.model, row) for row in got["input_ids"]])
    np.testing.assert_allclose(got["hidden"], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got["weight"], encoder.model.word_embeddings)


def test_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line has shapes, type, bytes, the text's sha256, tokens and loss; files are joined."""
    first, second, out = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "out.safetensors"
    first.write_bytes(b"one two\r\n")
    second.write_bytes("caf\u00e9 three".encode())
    assert run(second, first, "--batch", 1, "--seq-len", 5, "--out", out) == 0
    captured = capsys.readouterr()
    digest = hashlib.sha256("caf\u00e9 three\none two\r\n".encode()).hexdigest()
    (line,) = captured.out.splitlines()
    assert line.startswith(f"wrote {out}: logits [1, 5, 30522], input_ids [1, 5]; bf16 and int32")
    assert f" {out.stat().st_size} bytes; text sha256 {digest}; 5 tokens from 4 of text; " in line
    assert captured.err == ""
    assert sorted(tmp_path.iterdir()) == [first, second, out]


def test_short_text_repeats_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text too short for the batch goes round; a second run replaces the file."""
    text, out = tmp_path / "text.txt", tmp_path / "out.safetensors"
    text.write_text("cat dog")
    out.write_text("old")
    assert run(text, "--batch", 2, "--seq-len", 5, "--out", out) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "text has 2 tokens, fewer than the 6 needed: repeating it"
    assert len(said) == 2
    ids = load_file(out)["input_ids"]
    cat, dog = ids[0, 1:3].tolist()
    np.testing.assert_array_equal(ids, [[CLS, cat, dog, cat, SEP], [CLS, dog, cat, dog, SEP]])


def test_default_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is the project's own prose, sorted, and only what is there."""
    monkeypatch.setattr(script, "ROOT", tmp_path)
    with pytest.raises(script.InputError, match="name text files"):
        script.default_texts()
    names = ["CHANGELOG.md", "README.md", "docs/a.md", "docs/deep/b.md"]
    for name in [*names, "docs/c.txt", "other.md"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    assert script.default_texts() == [tmp_path / name for name in names]
    (tmp_path / "CHANGELOG.md").unlink()
    assert script.default_texts() == [tmp_path / name for name in names[1:]]


@pytest.mark.parametrize(
    ("args", "value", "remedy"),
    [
        (["missing.md"], "missing.md", "correct its path"),
        (["."], "text file .", "name a readable file"),
        (["latin1.md"], "latin1.md", "convert it to utf-8"),
        (["blank.md"], "0 tokens", "not blank"),
        (["text.md", "--batch", "0"], "--batch 0", "give 1 or more"),
        (["text.md", "--batch", "-2"], "--batch -2", "give 1 or more"),
        (["text.md", "--batch", "two"], "'two'", "see --help"),
        (["text.md", "--batch", "1000000000"], "--batch 1000000000", "lower either"),
        (["text.md", "--seq-len", "513"], "--seq-len 513", "give 3 to 512"),
        (["text.md", "--seq-len", "2"], "--seq-len 2", "give 3 to 512"),
        (["text.md", "--dtype", "f64"], "'f64'", "choose from"),
        (["text.md", "--form", "loss"], "'loss'", "choose from"),
        (["text.md", "--no-padding", "--batch", "9"], "the 2286 needed", "name more text"),
        (["text.md", "--out", "."], "--out .", "name a file in it"),
        (["text.md", "--out", "text.md/x"], "--out text.md/x", "name another place"),
    ],
)
def test_bad_input(
    args: list[str],
    value: str,
    remedy: str,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bad input is one lower-case line that names the value and the remedy, exit 2, no file."""
    (tmp_path / "latin1.md").write_bytes(b"caf\xe9")
    (tmp_path / "blank.md").write_text(" \n")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert run("--out", "new/out.safetensors", *args) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    prefix, _, message = line.partition("make_real_logits: error: ")
    assert prefix == "" and not message[0].isupper()
    assert value in message and remedy in message
    assert captured.out == ""
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("failure", [OSError, SafetensorError])
def test_failed_write_leaves_the_old_file(
    failure: type[Exception],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A write that fails half-way exits 1 and leaves what was there, and nothing else."""

    def full_disk(_tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise failure("No space left on device")

    monkeypatch.setattr(script, "save_file", full_disk)
    out = tmp_path / "out.safetensors"
    out.write_text("old")
    assert run(text_file, "--batch", 1, "--seq-len", 8, "--out", out) == 1
    assert "No space left" in capsys.readouterr().err
    assert out.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [out, text_file]


def test_file_mode_follows_umask(text_file: Path, tmp_path: Path) -> None:
    """The file can be read by whoever can read any other new file."""
    out = tmp_path / "out.safetensors"
    assert run(text_file, "--batch", 1, "--seq-len", 8, "--out", out) == 0
    assert out.stat().st_mode == text_file.stat().st_mode


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with the real launcher, nothing to install and a script that tells its call."""
    root = tmp_path / "a project"
    (root / "scripts").mkdir(parents=True)
    for name in ("make_real_logits", "setup.sh", "packages.sh", "help.sh"):
        shutil.copy(SCRIPTS / name, root / "scripts")
    (root / "scripts" / "requirements-real.txt").write_text("# nothing\n")
    (root / "scripts" / "make_real_logits.py").write_text(
        "import os, sys\nprint([os.getcwd(), sys.prefix, *sys.argv[1:]])\nsys.exit(7)\n"
    )
    return root


def launch(project: Path, cwd: Path, python: str) -> subprocess.CompletedProcess[str]:
    """Runs the launcher from `cwd` with two arguments; `python` makes the environment."""
    return subprocess.run(
        [project / "scripts" / "make_real_logits", "a b", "--form"],
        cwd=cwd,
        env={**os.environ, "PYTHON": python},
        capture_output=True,
        text=True,
        check=False,
    )


def test_launcher_sets_up_once(project: Path, tmp_path: Path) -> None:
    """The launcher makes .venv, installs once per requirements file, and passes all on."""
    want = f"{[str(tmp_path), str(project / '.venv'), 'a b', '--form']}\n"
    first = launch(project, tmp_path, sys.executable)
    assert (first.returncode, first.stdout) == (7, want), first.stderr
    assert "making .venv" in first.stderr and "installing" in first.stderr

    second = launch(project, tmp_path, "/no/such/python")
    assert (second.returncode, second.stdout, second.stderr) == (7, want, "")

    with (project / "scripts" / "requirements-real.txt").open("a") as file:
        file.write("# changed\n")
    third = launch(project, tmp_path, "/no/such/python")
    assert third.returncode == 7
    assert "installing" in third.stderr and "making" not in third.stderr


def test_launcher_retries_a_failed_install(project: Path, tmp_path: Path) -> None:
    """An install that fails exits 2 and is tried again, since it left no stamp."""
    requirements = project / "scripts" / "requirements-real.txt"
    requirements.write_text("./no-such-package\n")
    failed = launch(project, tmp_path, sys.executable)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert "pip could not install" in failed.stderr.splitlines()[-1]
    again = launch(project, tmp_path, sys.executable)
    assert again.returncode == 2 and "installing" in again.stderr


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (None, "not found: install python 3.11 or later"),
        ('[ "$1" = --version ] && echo Python 3.9.2; exit 1', "(Python 3.9.2) is not python 3.11"),
        ('[ "$1" = -c ] || { mkdir .venv; exit 1; }', "-m venv failed: install its venv module"),
    ],
)
def test_launcher_without_a_usable_python(
    body: str | None, message: str, project: Path, tmp_path: Path
) -> None:
    """A missing, old or incomplete Python is one clear line and leaves no .venv."""
    python = tmp_path / "python"
    if body is not None:
        python.write_text(f"#!/bin/sh\n{body}\n")
        python.chmod(0o755)
    result = launch(project, tmp_path, str(python))
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr.splitlines()[-1]
    assert not (project / ".venv").exists()
