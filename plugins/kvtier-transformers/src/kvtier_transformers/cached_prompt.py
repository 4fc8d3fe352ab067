"""A prompt, or a batch of them, with a cache for callers who run the model themselves.

Decides whether sequences may be stored: their keys must be those of the tokens whose KV the cache holds.
"""

from collections.abc import Callable, Collection, Sequence

from kvtier_transformers.batch import TokenIds, read_matrix
from kvtier_transformers.errors import CacheError
from kvtier_transformers.sequences import Running


class Prompt:
    """A prompt whose cached prefix is loaded, for callers who run the model themselves. Or a batch of several.

    Made by ``Engine.cache_for``. ``hit_tokens`` are the columns that the cache holds from the start, padding included.
    """

    def __init__(
        self,
        running: Running,
        padding: Collection[int],
        store: Callable[[Sequence[Sequence[int]], int], None],
    ) -> None:
        """*padding* are the tokens that ``generate`` puts behind a sequence that has ended before others.

        *store* is given the new tokens of each sequence, and how many columns have been computed.
        """
        self.cache = running.cache
        self.hit_tokens = running.hit_tokens
        self._prompts = running.prompts
        self._log = running.log
        self._stored = [prompt.token_ids for prompt in running.prompts]
        self._padding = padding
        self._store = store

    def store(self, sequence: TokenIds) -> None:
        """Hand on the blocks of *sequence*: the prompt and what the model made of it. Returns when they are copied.

        Of a batch *sequence* is the matrix that ``generate`` returns. The tokens must be those that went through
        ``cache``, in order; what the cache does not hold is left out. May be called again with a longer sequence.
        Raises ``CacheError`` when *sequence* does not begin with the prompt and with what was stored before, is shorter
        than what the cache holds, or has other tokens than went through the model, when a forward pass was cut off half
        way, or when the copies take too long.
        """
        matrix = read_matrix(sequence)
        if len(matrix) != len(self._prompts):
            raise CacheError(
                f"a batch of {len(matrix)} sequences to store, and the cache was made for {len(self._prompts)}"
            )
        held = self.cache.get_seq_length()
        flat = [
            tuple(columns[prompt.begin : prompt.end])
            for columns, prompt in zip(matrix, self._prompts, strict=True)
        ]
        for number in range(len(flat)):
            self._check(number, flat[number], held)
        if len({layer.get_seq_length() for layer in self.cache.layers if layer.keys is not None}) > 1:
            raise CacheError(
                "the layers hold different numbers of tokens: a forward pass was cut off half way, and what came after "
                "it can't be trusted"
            )
        width = len(matrix[0])
        if held > width:
            raise CacheError(
                f"the cache holds {held} tokens, the sequence to store has {width}: store all that went through "
                f"the model, or take the last away first, with cache.crop({width - held})"
            )
        if len(flat) > 1:
            flat = [
                self._without_padding(ids, len(stored))
                for ids, stored in zip(flat, self._stored, strict=True)
            ]
        new = [ids[len(stored) :] for ids, stored in zip(flat, self._stored, strict=True)]
        self._stored = flat
        self._store(new, held)

    def _check(self, number: int, flat: tuple[int, ...], held: int) -> None:
        stored, prompt = self._stored[number], self._prompts[number]
        which = f"sequence {number} of those to store" if len(self._prompts) > 1 else "the sequence to store"
        if flat[: len(stored)] != stored:
            raise CacheError(
                f"{which} does not begin with the prompt this cache was made for"
                if len(stored) == len(prompt.token_ids)
                else f"{which} does not begin with the {len(stored)} tokens stored before: take another cache for it"
            )
        computed = self._log.held(number, held)[prompt.begin : prompt.end]
        for position, (token, other) in enumerate(zip(flat, computed, strict=False)):
            if token != other:
                raise CacheError(
                    f"{which} has token {token} at position {position}, and {other} went through the model there: "
                    "store what was computed, and feed the model what follows hit_tokens alone"
                )

    def _without_padding(self, ids: tuple[int, ...], least: int) -> tuple[int, ...]:
        """*ids* without what repeats a token of padding at the end, and at *least* so many."""
        count = len(ids)
        while count > least and ids[count - 1] in self._padding and ids[count - 2] == ids[count - 1]:
            count -= 1
        return ids[:count]
