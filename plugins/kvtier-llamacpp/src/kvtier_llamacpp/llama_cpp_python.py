"""llama-cpp-python's ``Llama`` with kvtier behind it: prompts that it computed before a restart are restored.

llama-cpp-python is no dependency, since it compiles llama.cpp when it is installed. Its library is another build of
llama.cpp than xllamacpp's: no struct is shared, and so is no block.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvtier_core import ClosedError, ConfigError, PluginError, Settings, UnsupportedModelError, load_settings
from kvtier_llamacpp.binding import F16, bind
from kvtier_llamacpp.canary import trial_tokens
from kvtier_llamacpp.context import Memory
from kvtier_llamacpp.errors import LlamaError
from kvtier_llamacpp.keeper import Keeper
from kvtier_llamacpp.model import LoadedModel
from kvtier_weights import digest_weights

VERSIONS = ("0.3.36",)
"""The versions of llama-cpp-python whose ``Llama`` is known to work as this class expects."""
_PACKAGE = "llama-cpp-python"
_INSTALL = f"pip install {_PACKAGE}=={VERSIONS[-1]} (it compiles llama.cpp)"

try:
    import llama_cpp
    from llama_cpp import Llama, llama_chat_format
    from llama_cpp._internals import LlamaContext
except ModuleNotFoundError as error:
    raise ImportError(f"kvtier_llamacpp.llama_cpp_python needs llama-cpp-python: {_INSTALL}") from error

_NOT_SERVED: Mapping[str, tuple[object, str]] = {
    "draft_model": (None, "a draft model takes tokens back that were computed"),
    "embedding": (False, "embeddings are of whole texts, and nothing of them is kept"),
    "logits_all": (False, "there are no logits of tokens that were restored"),
    "lora_path": (None, "an adapter changes the weights, by whose file blocks are named"),
    "swa_full": (True, "blocks behind a sliding window would be gone before they are read"),
    "use_mmap": (False, "a mapped file that is written to changes the weights in use"),
    "vocab_only": (False, "a vocabulary has no KV"),
}
"""Options of ``Llama`` that are not served with another value than this one, and why."""
_SETS_UP_NO_KV = frozenset({"n_ctx", "no_perf"})
"""Parameters of a context on which no byte of KV depends."""
_READERS_OF_PICTURES = (llama_chat_format.Llava15ChatHandler, llama_chat_format.MTMDChatHandler)


class KvtierLlama(Llama):
    """A ``llama_cpp.Llama`` that restores prompts from kvtier's pool and tiers, and keeps those that it computes.

    *kvtier* are settings: a mapping like the TOML file, the path of such a file, or loaded settings; unset, the
    environment and the file that ``KVTIER_CONFIG`` names. ``wait_timeout_s`` bounds every wait for tiers and copies.
    All other options are those of ``Llama``. Raises ``UnsupportedModelError`` for options and models that are not
    served, and as ``load_settings`` and ``open_session`` do.

    One prompt at a time: an answer that was not read to its end can't be read on once another prompt was begun.
    """

    _closed = False
    _last_steps: Callable[[], object] | None = None
    _ctx: Any
    n_tokens: int

    def __init__(
        self,
        model_path: str,
        *,
        kvtier: Mapping[str, Any] | Path | str | Settings | None = None,
        wait_timeout_s: float = 30.0,
        **options: Any,
    ) -> None:
        _check_version()
        options = {"swa_full": True, "use_mmap": False, **options}
        _check_options(options)
        settings = _load(kvtier)
        model = LoadedModel(bind(llama_cpp.llama_cpp._lib._name), Path(model_path))  # noqa: SLF001 - its only handle
        super().__init__(str(model_path), **options)
        self.hits_by_tier: Mapping[str, int] = {}
        """Tokens of the last prompt that were restored, by where they came from."""
        self.misses: Sequence[Mapping[str, Any]] = ()
        """Why no more of the last prompt was restored."""
        self._kvtier = kvtier
        self._wait_timeout_s = wait_timeout_s
        self._told: list[int] | None = None
        """The tokens that kvtier knows of the prompt at hand; ``None`` while there is none."""
        self._turn = object()
        """The answer that is being read."""
        self._alone = threading.RLock()
        """Held while a prompt is restored, and for every step of an answer."""
        self._num_own = 0
        """Tokens at the beginning of llama.cpp's memory that were computed by ``eval``, or restored."""
        try:
            model.take(self.model)
            self._check_model(model)
            self._open_second_sequence()
            self._keeper = self._open_keeper(model, settings, wait_timeout_s)
        except BaseException:
            super().close()
            raise
        self._last_steps = weakref.finalize(self, _finish, self._keeper, wait_timeout_s, os.getpid())

    def _check_model(self, model: LoadedModel) -> None:
        if model.has_state or self._ctx.memory is None:
            what = "keeps a state" if model.has_state else "keeps no KV"
            raise UnsupportedModelError(
                f"{model.path} ({model.description}) {what}: KvtierLlama keeps the KV of attention alone"
            )

    def _open_second_sequence(self) -> None:
        """Blocks pass through a sequence of their own, and ``Llama`` asks for one sequence."""
        self.context_params.n_seq_max = 2
        self.context_params.kv_unified = True
        self._ctx.close()
        context = LlamaContext(model=self._model, params=self.context_params, verbose=self.verbose)
        self._ctx = self._stack.enter_context(closing(context))

    def _open_keeper(self, model: LoadedModel, settings: Settings, wait_timeout_s: float) -> Keeper:
        block = settings.pool.block_size
        if len(self.input_ids) < trial_tokens(block):
            raise ConfigError(
                f"n_ctx={len(self.input_ids)}: blocks of {block} tokens need at least {trial_tokens(block)}"
            )
        self._memory = _BorrowedMemory(weakref.proxy(self), model, block)
        types = (self.context_params.type_k, self.context_params.type_v)
        return Keeper.open(
            self._memory,
            settings,
            num_blocks=-(-len(self.input_ids) // block),
            setup=f"{_build(model.lib)}, {self._setup()}",
            kv_dtype="float16" if types == (F16, F16) else f"ggml types {types[0]} and {types[1]}",
            wait_timeout_s=wait_timeout_s,
        )

    def _setup(self) -> str:
        """Every number with which the context was made, by name; its pointers say nothing of bytes."""
        left_out = (
            {"no_perf"} if self.kv_overrides else _SETS_UP_NO_KV
        )  # the room may choose what they say of rope
        names = [name for name, *_ in self.context_params._fields_ if name not in left_out]
        values = {name: getattr(self.context_params, name) for name in names}
        numbers = [f"{name}={value}" for name, value in values.items() if isinstance(value, int | float)]
        return f"{' '.join(numbers)}, {sorted((self.kv_overrides or {}).items())} in the file's place"

    # -- one prompt

    def generate(
        self, tokens: Sequence[int], *, reset: bool = True, **options: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """As ``Llama.generate``; the beginning of *tokens* is restored if it is stored.

        With ``reset=False`` they follow what is in memory, and nothing is restored or kept. Raises ``LlamaError`` where
        it is read on after another prompt was begun.
        """
        prompt = list(tokens)
        with self._used_alone():
            turn = self._turn = object()
            self._end()
            self.hits_by_tier, self.misses = {}, ()
            if reset:
                self._begin(prompt)
        answer = super().generate(prompt, reset=reset, **options)
        sent: Sequence[int] | None = None
        try:
            while True:
                with self._used_alone():
                    if self._turn is not turn:
                        raise LlamaError(
                            "another prompt was begun before this answer was read to its end, and took its place in "
                            "memory: read answers one after another, or use a KvtierLlama for each"
                        )
                    try:
                        token = answer.send(sent)
                    except StopIteration:
                        return
                sent = yield token
        finally:
            answer.close()
            if self._turn is turn:
                self._end()

    def _begin(self, prompt: list[int]) -> None:
        """Restore what is stored of *prompt*, if that is more than what is in memory."""
        if not 0 < len(prompt) <= len(self.input_ids) or self._num_own < self.n_tokens:
            return  # nothing to restore, or what is in memory is more than its tokens say
        held = self.longest_token_prefix(self._input_ids.tolist(), prompt)
        self._keeper.begin(prompt, held=held)
        try:
            restored = self._keeper.restore(len(prompt), held)
            self.misses = self._keeper.misses()
            if restored > held:
                self.hits_by_tier = self._keeper.hits_by_tier()
                self.input_ids[:restored] = prompt[:restored]
                self.n_tokens = self._num_own = restored
        except BaseException:
            self.reset()
            self._keeper.abort()
            raise
        self._told = prompt.copy()

    @contextmanager
    def _used_alone(self) -> Iterator[None]:
        if not self._alone.acquire(blocking=False):
            raise LlamaError("another thread uses this KvtierLlama: ask one after another")
        try:
            self._check_open()
            yield
        finally:
            self._alone.release()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this KvtierLlama was closed: make another")

    def _end(self) -> None:
        if self._told is not None:
            self._told = None
            self._keeper.end()

    def eval(self, tokens: Sequence[int]) -> None:
        """As ``Llama.eval``; what is computed of a prompt and its answer is kept."""
        for begin in range(0, len(tokens), self.n_batch):
            with self._used_alone():
                self._eval_piece(list(tokens[begin : begin + self.n_batch]))

    def _eval_piece(self, piece: list[int]) -> None:
        before = self.n_tokens
        if self._told is None:
            self._keeper.forget(before)
        started = time.perf_counter()
        super().eval(piece)
        if before <= self._num_own:
            self._num_own = self.n_tokens
        if self._told is None:
            return
        known = self._told[before : before + len(piece)]
        if before > len(self._told) or piece[: len(known)] != known or self._num_own < self.n_tokens:
            self._end()  # tokens were taken back: what follows is not what kvtier was told
            self._keeper.forget(before)
            return
        if known:
            self._keeper.learn_cost(len(known), time.perf_counter() - started)
        if len(piece) > len(known):
            self._keeper.append(piece[len(known) :])
            self._told += piece[len(known) :]
        if before // self._memory.tokens_per_block < self.n_tokens // self._memory.tokens_per_block:
            self._keeper.hand_on()

    def reset(self) -> None:
        """As ``Llama.reset``."""
        super().reset()
        self._num_own = 0

    def load_state(self, state: Any) -> None:
        """As ``Llama.load_state``. Nothing of it is kept: its KV may be that of other weights."""
        try:
            super().load_state(state)
        except BaseException:
            self.reset()  # what is in memory now is of no prompt
            raise
        self._num_own = 0

    def set_cache(self, cache: Any) -> None:
        """Raise ``UnsupportedModelError``: kvtier is the cache, and a second one would take its place."""
        if cache is not None:
            raise UnsupportedModelError("KvtierLlama has kvtier as its cache: leave set_cache out")

    # -- beside prompts

    def tokenize(self, *given: Any, **options: Any) -> list[int]:
        """As ``Llama.tokenize``."""
        self._check_open()
        return list(super().tokenize(*given, **options))

    def create_completion(self, *given: Any, **options: Any) -> Any:
        """As ``Llama.create_completion``."""
        self._check_open()
        return super().create_completion(*given, **options)

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until everything stored so far has reached the tiers; False when that takes longer."""
        return self._keeper.flush(timeout_s)

    def stats(self) -> Mapping[str, Any]:
        """The session's counters: hits by tier, misses by reason, bytes."""
        return self._keeper.stats()

    def close(self) -> None:
        """Wait for the tiers, close them with the pool, and give the model's memory back. Calling it twice is fine.

        A process that ends without it does the same. A step of an answer on another thread is waited for. Raises
        ``LlamaError`` when it does not end, and keeps the memory.
        """
        if self._last_steps is None:
            if hasattr(self, "_stack"):  # else an option was refused
                super().close()
            return
        if not self._alone.acquire(timeout=min(self._wait_timeout_s, threading.TIMEOUT_MAX)):
            raise LlamaError(
                f"another thread uses this KvtierLlama, and did not end within {self._wait_timeout_s:g} s: close again"
            )
        try:
            self._closed, self._turn, self._told = True, object(), None
            self._last_steps()
            super().close()
        finally:
            self._alone.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "kvtier": self._kvtier, "wait_timeout_s": self._wait_timeout_s}


class _BorrowedMemory(Memory):
    """The memory of a ``Llama``."""

    def __init__(self, llama: Any, model: LoadedModel, tokens_per_block: int) -> None:
        super().__init__(model, llama.ctx, tokens_per_block)
        self._llama = llama

    def clear(self) -> None:
        super().clear()
        self._llama.reset()

    def restore(self, blocks: NDArray[np.uint8], state: NDArray[np.uint8]) -> bool:
        taken = super().restore(blocks, state)
        self._llama.n_tokens = self.num_tokens
        return taken

    def decode(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        Llama.eval(self._llama, token_ids)
        return self._logits()


def _check_version() -> None:
    if llama_cpp.__version__ not in VERSIONS:
        raise PluginError(
            f"kvtier-llamacpp knows the inside of {_PACKAGE} {', '.join(VERSIONS)}, not of the {llama_cpp.__version__} "
            f"that is installed: {_INSTALL}"
        )


def _check_options(options: Mapping[str, Any]) -> None:
    for name, (served, why) in _NOT_SERVED.items():
        if (given := options.get(name, served)) != served:
            raise UnsupportedModelError(f"{name}={given!r}: KvtierLlama does not serve it: {why}")
    if isinstance(options.get("chat_handler"), _READERS_OF_PICTURES):
        raise UnsupportedModelError(
            "chat_handler: KvtierLlama serves text alone, and this handler reads pictures or sound"
        )
    if options.get("n_gpu_layers") and llama_cpp.llama_supports_gpu_offload():
        raise UnsupportedModelError(
            f"n_gpu_layers={options['n_gpu_layers']}: KvtierLlama serves CPUs alone: leave it out"
        )


def _load(given: Mapping[str, Any] | Path | str | Settings | None) -> Settings:
    if isinstance(given, Settings):
        return given
    if isinstance(given, Mapping):
        return load_settings(overrides=given)
    return load_settings(file=None if given is None else Path(given))


def _build(lib: Any) -> str:
    """What identifies this build of llama.cpp: what its libraries hold, since anybody may have compiled anything."""
    place = Path(llama_cpp.llama_cpp._lib._name).parent  # noqa: SLF001 - its only handle
    libraries = [*place.glob("libllama*"), *place.glob("libggml*")]
    return f"{_PACKAGE} of {digest_weights(libraries)} ({lib.llama_print_system_info().decode()})"


def _finish(keeper: Keeper, timeout_s: float, process: int) -> None:
    """What ``close`` and the end of the process have to do; in a forked child, nothing."""
    if os.getpid() == process:
        keeper.flush(timeout_s)
        keeper.close()
