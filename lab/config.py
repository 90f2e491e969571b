"""The configurations of model, training and machine; their fields are command-line options."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from tasks.base import MAX_ROWS
from tasks.bounds import check_choice, check_kind, option
from tasks.near_names import suggest

PAPER_LEARNING_RATES = {32: 4e-4, 64: 3e-4, 128: 2e-4, 256: 1e-4}
"""Learning rate by d_model (tab:multi_query_associative_recall:model)."""
PAPER_TOKENS_A_STEP = 65_536
PAPER_SEQ_LENS = (256, 512, 1024, 2048)
PAPER_TRAIN_ROWS = 2**18
PAPER_EPOCHS = 64
MOST_THREADS = 1_024
AUDIT_ROWS = 256
"""Test rows on which a run's shortcuts and its oracle are scored."""
LAB_TOKENS_A_STEP = 4_096
LAB_EVAL_EVERY = 25
LAB_SHORTEST_LEN = 16
"""Rows of 8 tokens, two pairs of mqar, teach some mixers what longer rows then contradict."""
LAB_TEST_TOKENS = 2**21
"""Maximum number of tokens of the test split: an evaluation on long rows must not take minutes."""
LAB_TABLE_LEARNING_RATES = (3e-3, 2e-2)
"""Learning rate of a table of up to 256 tokens, and the largest rate of a larger table."""
LAB_WIDEST = 128
"""The widest model that takes the common rate, at which wider ones learn nothing."""


Config = TypeVar("Config", bound="_Config")


class _Config:
    @classmethod
    def from_dict(cls: type[Config], values: Mapping[str, Any]) -> Config:
        """Build the configuration from a mapping of field names.

        Raises:
            ValueError: for a name that is not a field; names near ones, or lists the known.
        """
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for name in values:
            if name not in known:
                raise ValueError(f"unknown option {name!r}. {suggest(name, known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, ready for JSON."""
        return asdict(self)  # type: ignore[call-overload]


def _check_types(config: object) -> None:
    """Check that each field has a value of its type, or one of its choices."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        check_kind(name, value, hint)
        if get_origin(hint) is Literal:
            check_choice(name, value, get_args(hint))
        if isinstance(value, int) and abs(value) >= 2**63 and name != "seed":
            raise ValueError(f"{name}: must be below 2⁶³")
        if get_origin(hint) is dict and not isinstance(value, dict):
            raise ValueError(f"{name}={value!r}: must be an object")


def _require(holds: bool, name: str, value: object, bound: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value}: must be {bound}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(_Config):
    """A language model, apart from its vocabulary, which the task brings."""

    stack: str = option(
        "AM*2",
        "the blocks, as pairs of mixer and state transform, e.g. 'SE*7 IE', or 'ssd+M*2' with one "
        "of `lab mixers`",
    )
    d_model: int = option(64, "width of the residual stream")
    n_heads: int | None = option(
        1, "number of heads of every mixer", "1; beside --model, each mixer's own default"
    )
    model: str | None = option(
        None, "MODULE:CLASS of your own mixer; the letter U of --stack stands for it"
    )
    options: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "an option of layers: S.d_state=64 for every S, 1.A.mask=soft for block 1's A",
            "flag": "--option",
            "metavar": "LAYER.NAME=VALUE",
        },
    )
    tied: bool = option(True, "use the embedding table as the output head")
    train_embedding: bool = option(
        True, "train the embedding table, or keep its random initial values"
    )
    embedding_std: float = option(1.0, "standard deviation of the initial embedding table")

    logit_scale: float = option(1.0, "constant that multiplies the logits", "1/√d_model")

    def __post_init__(self):
        _check_types(self)
        _require(self.d_model >= 1, "d_model", self.d_model, "≥ 1")
        heads = 1 if self.n_heads is None else self.n_heads
        _require(heads >= 1, "n_heads", self.n_heads, "≥ 1")
        _require(
            self.d_model % heads == 0,
            "d_model",
            self.d_model,
            f"a multiple of n_heads={self.n_heads}",
        )
        for name in ("embedding_std", "logit_scale"):
            value = getattr(self, name)
            _require(0 < value < math.inf, name, value, "> 0 and finite")

    @property
    def name(self) -> str:
        """The stack, with the class of the user's mixer if there is one."""
        return self.stack if self.model is None else f"{self.stack} ({self.model})"


@dataclass(frozen=True, kw_only=True)
class TrainConfig(_Config):
    """How a model is trained. Nothing here depends on the machine (see `Runtime`)."""

    protocol: Literal["lab", "paper"] = option(
        "lab", "which defaults to use: this lab's or the paper's"
    )
    seed: int = option(0, "seed of the rows and of the initial weights")
    init: Literal["random", "oracle"] = option(
        "random", "initial weights: random, or set by hand to solve the task (oracle)"
    )
    optimizer: Literal["muon", "adamw"] = option(
        "muon", "muon uses Muon for matrices and AdamW for the rest"
    )
    muon_on: Literal["all", "mixers", "mlps"] = option(
        "all", "whose matrices Muon trains: of all layers, of mixers, or of MLPs and experts"
    )
    learning_rate: float = option(3e-3, "peak learning rate")
    table_learning_rate: float | None = option(
        None,
        "learning rate of embedding and head at the first row length",
        "3e-3 · √(V/256), ≤ 2e-2",
    )
    schedule: Literal["constant", "cosine", "error"] = option(
        "constant",
        "learning rate after the warm-up; error: falls with the share of wrong validation answers, "
        "and is halved when that share stops falling",
        "error; cosine in --protocol paper",
    )
    warmup_steps: int = option(50, "steps of linear warm-up")
    weight_decay: float = option(0.0, "decoupled weight decay of matrices")
    clip_norm: float = option(1.0, "clip the norm of the gradient to this")
    batch_size: int = option(64, "rows per step", f"{LAB_TOKENS_A_STEP} tokens")
    max_steps: int = option(20_000, "stop after this many steps")
    lengthen: bool = option(
        False, "start with short rows and lengthen them", "on; off in --protocol paper"
    )
    start_len: int | None = option(
        None,
        "length of the first rows; must divide seq_len",
        "seq_len halved while at least --shortest-len",
    )
    shortest_len: int = option(
        8, "fewest tokens of the first rows when --start-len is not given", f"{LAB_SHORTEST_LEN}"
    )
    lengthen_at: float = option(0.99, "validation accuracy at which rows are lengthened")
    stage_steps: int = option(5_000, "maximum number of steps at one row length below seq_len")
    unlearned: Literal["stop", "lengthen"] = option(
        "stop",
        "what follows --stage-steps on rows that are not learned: stop, or lengthen them all the "
        "same",
    )
    train_rows: int | None = option(
        None, "size of the training set; if not given, every row is new"
    )
    test_rows: int = option(
        1024, "rows of the test split", "1024, or fewer if they exceed 2²¹ tokens"
    )
    eval_every: int = option(
        100, "steps between evaluations on validation rows", f"{LAB_EVAL_EVERY}"
    )
    early_stop: bool = option(
        True, "stop when validation accuracy and then test accuracy reach --solved-at"
    )
    solved_at: float = option(0.99, "accuracy that counts as solved")
    precision: Literal["auto", "fp32", "bf16"] = option(
        "auto", "precision of training; auto measures which is faster"
    )

    def __post_init__(self):
        _check_types(self)
        _require(0 <= self.seed < 2**63, "seed", self.seed, "in 0 … 2⁶³ − 1")
        for name in (
            "max_steps",
            "stage_steps",
            "shortest_len",
            "batch_size",
            "test_rows",
            "eval_every",
        ):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "≥ 1")
        for name in ("test_rows", "train_rows"):
            value = getattr(self, name)
            _require(value is None or value <= MAX_ROWS, name, value, f"≤ {MAX_ROWS}")
        for name in ("learning_rate", "table_learning_rate", "clip_norm"):
            value = getattr(self, name)
            _require(value is None or 0 < value < math.inf, name, value, "> 0 and finite")
        for name in ("warmup_steps", "weight_decay"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, name, value, "≥ 0 and finite")
        for name in ("solved_at", "lengthen_at"):
            _require(0 < getattr(self, name) <= 1, name, getattr(self, name), "in (0, 1]")
        start = self.start_len
        _require(start is None or start >= 1, "start_len", start, "≥ 1")
        if self.train_rows is not None:
            _require(
                self.train_rows % self.batch_size == 0 and self.train_rows > 0,
                "train_rows",
                self.train_rows,
                f"a positive multiple of batch_size={self.batch_size}",
            )


@dataclass(frozen=True, kw_only=True)
class Runtime(_Config):
    """Where and how long a run computes; may change when a run is resumed."""

    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    threads: int | None = option(
        None, "threads of the CPU to compute with", "measured: whichever number is fastest"
    )
    max_minutes: float | None = option(
        None,
        "stop training after this many minutes; test and report follow, and the same command "
        "resumes",
    )
    checkpoint_every: int = option(200, "steps between checkpoints")
    history: bool = option(
        True, "keep the weights of about 30 to 50 steps, to analyse how training went"
    )
    certify: bool | None = option(
        None,
        "before training, test the layers against the laws that training relies on, and do not "
        "train if one fails",
        "on for --model",
    )
    log: Literal["tensorboard", "wandb"] | None = option(
        None, "also send the metrics of every step to this logger"
    )

    def __post_init__(self):
        _require(self.checkpoint_every >= 1, "checkpoint_every", self.checkpoint_every, "≥ 1")
        if self.threads is not None:
            _require(
                1 <= self.threads <= MOST_THREADS, "threads", self.threads, f"in 1 … {MOST_THREADS}"
            )
        if self.max_minutes is not None:
            _require(self.max_minutes > 0, "max_minutes", self.max_minutes, "> 0")


def get_protocol_defaults(
    protocol: str, seq_len: int, vocab_size: int, d_model: int
) -> dict[str, Any]:
    """Return the defaults that a protocol sets: fields of `ModelConfig` and `TrainConfig` by name.

    `lab` is this project's own (LOG.md says how it was found). `paper` is the paper's hard MQAR:
    65,536 tokens a step, 64 epochs of 2^18 rows, AdamW with decay 0.01, 10 % warm-up, cosine to a
    tenth, learning rate by width (tab:multi_query_associative_recall:data and :model, and the
    list of § Downstream Evaluation).

    Departs: the paper states no initial scale and no head; `paper` ties a table of std 0.02,
    as the code it builds on does. It states no clipping and no early stop; the lab's stay.

    Raises:
        ValueError: when the width is below 1, or the paper states no value for this width or
            length.
    """
    check_kind("d_model", d_model, int)
    _require(d_model >= 1, "d_model", d_model, "≥ 1")
    if protocol == "lab":
        return {
            "logit_scale": d_model**-0.5,
            "learning_rate": TrainConfig.learning_rate * min(1.0, LAB_WIDEST / d_model),
            "table_learning_rate": _table_learning_rate(vocab_size),
            "batch_size": max(1, LAB_TOKENS_A_STEP // seq_len),
            "schedule": "error",
            "lengthen": True,
            "shortest_len": LAB_SHORTEST_LEN,
            "test_rows": max(64, min(TrainConfig.test_rows, LAB_TEST_TOKENS // seq_len)),
            "eval_every": LAB_EVAL_EVERY,
        }
    if d_model not in PAPER_LEARNING_RATES:
        known = ", ".join(map(str, PAPER_LEARNING_RATES))
        raise ValueError(f"d_model={d_model}: --protocol paper states learning rates for {known}")
    if seq_len not in PAPER_SEQ_LENS:
        known = ", ".join(map(str, PAPER_SEQ_LENS))
        raise ValueError(f"seq_len={seq_len}: --protocol paper states batches for {known}")
    batch_size = PAPER_TOKENS_A_STEP // seq_len
    max_steps = PAPER_EPOCHS * PAPER_TRAIN_ROWS // batch_size
    return {
        "tied": True,
        "embedding_std": 0.02,
        "optimizer": "adamw",
        "learning_rate": PAPER_LEARNING_RATES[d_model],
        "schedule": "cosine",
        "warmup_steps": max_steps // 10,
        "weight_decay": 0.01,
        "batch_size": batch_size,
        "max_steps": max_steps,
        "train_rows": PAPER_TRAIN_ROWS,
        "precision": "fp32",
    }


def _table_learning_rate(vocab_size: int) -> float:
    """Return the lab's rate for a table: the more tokens, the rarer each, the larger its steps."""
    small, most = LAB_TABLE_LEARNING_RATES
    return min(most, small * max(1.0, vocab_size / 256) ** 0.5)
