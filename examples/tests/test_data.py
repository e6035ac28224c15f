"""Packing: every token once, labels within their document, an order that the seed gives."""

from pathlib import Path

import numpy as np
import pytest
from train import data
from train.config import InputError, Options, resolve


def documents(rng: np.random.Generator, count: int) -> list[data.I32]:
    lengths = rng.integers(1, 40, count)
    return [rng.integers(0, 100, length).astype(np.int32) for length in lengths]


def test_windows_hold_the_text_in_order(rng: np.random.Generator) -> None:
    made = documents(rng, 20)
    ids, segments = data.pack(made, 17)
    whole = np.concatenate(made)
    assert np.array_equal(ids.reshape(-1), whole[: ids.size]) and whole.size - ids.size < 17
    # Where the document changes, and only there, within a window.
    numbers = np.repeat(np.arange(20), [len(one) for one in made])[: ids.size].reshape(ids.shape)
    assert np.array_equal(np.diff(segments) != 0, np.diff(numbers) != 0)
    assert (segments[:, 0] == 0).all()


def test_labels_are_the_next_token_of_the_same_document(rng: np.random.Generator) -> None:
    ids, segments = data.pack(documents(rng, 30), 9)
    batch = data.Batches(ids, segments, batch=len(ids), seed=3)(0)
    seen = 0
    for tokens, labels, owners, places in zip(
        *(batch[name] for name in ("tokens", "labels", "segments", "positions")), strict=True
    ):
        row = int(np.flatnonzero((ids[:, :-1] == tokens).all(1))[0])
        for at, (label, owner) in enumerate(zip(labels, owners, strict=True)):
            is_same = owner == segments[row, at + 1]
            assert label == (ids[row, at + 1] if is_same else -100)
            first = int(np.flatnonzero(owners == owner)[0])
            assert places[at] == at - first
            seen += is_same
    assert seen


@pytest.mark.parametrize("batch", [1, 4, 7, 30])
def test_each_epoch_has_every_window_once(rng: np.random.Generator, batch: int) -> None:
    ids = np.arange(10, dtype=np.int32)[:, None] * np.ones(4, np.int32)
    batches = data.Batches(ids, np.zeros_like(ids), batch, seed=int(rng.integers(1000)))
    order = np.concatenate([batches(step)["tokens"][:, 0] for step in range(60 // batch + 1)])
    for epoch in range(5):
        assert sorted(order[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert not np.array_equal(order[:10], order[10:20])


def test_permuted_batch_has_the_same_sequences() -> None:
    ids = np.arange(64, dtype=np.int32)[:, None] * np.ones(4, np.int32)
    plain = data.Batches(ids, np.zeros_like(ids), 16, seed=1)(2)["tokens"][:, 0]
    permuted = data.Batches(ids, np.zeros_like(ids), 16, seed=1, permute=True)(2)["tokens"][:, 0]
    assert sorted(plain) == sorted(permuted) and not np.array_equal(plain, permuted)


def test_small_vocabulary_keeps_the_frequent_tokens() -> None:
    text = "the kernel reads the logits once. " * 5 + "an odd word: xyzzy"
    whole, small = (data.tokenize([text], vocab)[0] for vocab in (40000, 8))
    assert len(whole) == len(small) and small.max() == 7
    # The most frequent is 0, and each of the seven kept has one id.
    values, counts = np.unique(whole, return_counts=True)
    assert set(whole[small == 0]) == {values[np.argmax(counts)]}
    assert all(len(set(whole[small == kept])) == 1 for kept in range(7))


def test_text_is_of_the_repository() -> None:
    files = data.default_files()
    names = {file.name for file in files}
    assert {"README.md", "cross_entropy.rs", "model.py"} <= names
    assert len(data.tokenize(data.read(files[:1]), 30522)[0]) > 100


def test_text_that_is_not_there(tmp_path: Path) -> None:
    blank, binary = tmp_path / "blank.md", tmp_path / "binary.md"
    blank.write_text(" \n")
    binary.write_bytes(b"\xff\xfe")
    for files, message in (
        ((), "no text in 0 files: name text files"),
        ((blank,), "no text in 1 files"),
        ((binary,), "is not utf-8 (byte 0)"),
        ((tmp_path / "absent.md",), "cannot be read (no such file or directory)"),
    ):
        with pytest.raises(InputError) as raised:
            data.read(files)
        assert message in str(raised.value)
    short = tmp_path / "short.md"
    short.write_text("three short words")
    with pytest.raises(InputError, match="the text has 4 tokens, fewer than the 33"):
        data.load(resolve(Options(model_size="test", text=(short,))))
