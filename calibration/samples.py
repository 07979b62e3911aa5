"""Token sequences from text files: balanced over the files, and the same for the same seed.

Every file is one domain. Breadth of domains is worth more than anything else in calibration data,
so sequences get shorter before a file is left out.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from mxfp4.errors import CheckpointError, MissingExtraError, RecipeError

DOCUMENT_SEPARATOR = "\n\f\n"
"""A line with a form feed ends a document; a file without any is one document."""

_SHORTEST_SEQUENCE = 32


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    @property
    def eos_token_id(self) -> Any:
        """Token put between documents, or None."""
        ...

    def __call__(self, text: str, /, *, add_special_tokens: bool) -> Any:
        """A mapping with `input_ids`."""
        ...


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """How much text is taken; `seed` decides which documents."""

    token_count: int = 32_768
    sequence_length: int = 512
    seed: int = 0


@dataclass(frozen=True)
class Samples:
    """`tokens` int64 [S, T], and the domain of each of the S sequences."""

    tokens: torch.Tensor
    domains: tuple[str, ...]

    @property
    def token_count(self) -> int:
        """Tokens of all sequences."""
        return self.tokens.numel()

    @property
    def halves(self) -> tuple[int, ...]:
        """0 or 1 for each sequence, so that every domain is in both halves where it can be."""
        order = list(dict.fromkeys(self.domains))
        seen = [self.domains[:i].count(domain) for i, domain in enumerate(self.domains)]
        return tuple(
            (turn + order.index(domain)) % 2
            for turn, domain in zip(seen, self.domains, strict=True)
        )

    @property
    def sha256(self) -> str:
        """Hash of tokens and shape: names the data in reports and resume records."""
        data = self.tokens.contiguous().numpy().tobytes()
        return hashlib.sha256(repr(tuple(self.tokens.shape)).encode() + data).hexdigest()


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a checkpoint folder; raises `MissingExtraError` without transformers."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("transformers", "calibrate") from error
    try:
        load: Any = AutoTokenizer.from_pretrained
        tokenizer: Tokenizer = load(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"its tokenizer cannot be loaded ({error})",
            file=str(folder),
            hint="add tokenizer.json and tokenizer_config.json to the folder",
        ) from error
    return tokenizer


def read_samples(
    files: Sequence[Path], tokenizer: Tokenizer, options: SampleOptions | None = None
) -> Samples:
    """Sequences that take turns between the files until `token_count` is reached.

    Documents are drawn in an order that the seed decides and joined with the tokenizer's end
    token. Raises `RecipeError` when the files do not hold enough text for one sequence each.
    """
    options = options or SampleOptions()
    if not files:
        raise RecipeError("no text file was given", hint="--text FILE, once per domain")
    length = sequence_length(options, len(files))
    wanted = max(options.token_count // length, 1)
    share = -(-wanted // len(files))
    pools = {_domain(file): _sequences(file, tokenizer, length, share, options) for file in files}
    rows: list[tuple[str, list[int]]] = []
    for turn in range(share):
        rows += [(domain, pool[turn]) for domain, pool in pools.items() if turn < len(pool)]
    if not rows:
        raise RecipeError(
            f"the text is shorter than one sequence of {length} tokens",
            file=str(files[0]),
            hint="give more text or a smaller --sequence-length",
        )
    rows = rows[:wanted]
    tokens = torch.tensor([row for _, row in rows], dtype=torch.int64)
    return Samples(tokens, tuple(domain for domain, _ in rows))


def sequence_length(options: SampleOptions, file_count: int) -> int:
    """The asked length, or less when the token budget would not give every file a sequence."""
    fair = options.token_count // file_count
    return min(options.sequence_length, max(fair, _SHORTEST_SEQUENCE))


def _domain(file: Path) -> str:
    return file.name.split(".")[0]


def _sequences(
    file: Path, tokenizer: Tokenizer, length: int, count: int, options: SampleOptions
) -> list[list[int]]:
    """Up to `count` sequences of a file."""
    tokens: list[int] = []
    for text in _documents(file, options.seed):
        if tokenizer.eos_token_id is not None:
            tokens.append(int(tokenizer.eos_token_id))
        tokens += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) >= count * length:
            break
    full = len(tokens) // length
    return [tokens[i * length : (i + 1) * length] for i in range(min(full, count))]


def _documents(file: Path, seed: int) -> Iterator[str]:
    try:
        found = file.read_text(encoding="utf-8").split(DOCUMENT_SEPARATOR)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read this text ({error})", file=str(file)) from error
    random.Random(f"{seed}:{file.name}").shuffle(found)
    yield from found
