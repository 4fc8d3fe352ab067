"""A real SGLang answers from restored KV as from its own, whatever happens to the tiers.

Its processes take a while to import, so each engine is asked many things.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.distributions import Site
from tests.sglang.asking import LONG, WHOLE, restore, store
from tests.sglang.engines import PAGE, Engine, needs_sglang, prompt, save_model

pytestmark = [needs_sglang, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory; in SGLang's processes there is a tier type ``controlled``."""
    directory = tmp_path_factory.mktemp("sglang")
    (directory / "site").mkdir()
    Site(directory / "site").install(
        "kvtier-controlled", {"kvtier.tiers.v1": {"controlled": "tests.sglang.controlled:ControlledTier"}}, {}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(directory / "site"))  # SGLang's processes get this one's path
        yield directory


@pytest.fixture(scope="module")
def model(place: Path) -> Path:
    return save_model(place / "model")


def _config(place: Path, name: str, tier: str) -> Path:
    file = place / f"{name}.toml"
    file.write_text(f'on_reset = "pool"\n[pool]\ncapacity = "16MiB"\n[tiers.{name}]\n{tier}')
    return file


@pytest.fixture(scope="module")
def config(place: Path) -> Path:
    tier = f'type = "disk"\nlayout = "files"\nroot = "{place}/blocks"\ncapacity = "64MiB"\nmin_free = 0\n'
    return _config(place, "disk", tier)


@pytest.fixture(scope="module")
def on_disk(place: Path, model: Path, config: Path) -> Iterator[Engine]:
    engine = Engine(model, place / "on_disk.log", config=config)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def controlled(place: Path, model: Path) -> Iterator[tuple[Engine, Path]]:
    root = place / "controlled"
    root.mkdir()
    config = _config(place, "controlled", f'type = "controlled"\nroot = "{root}"\n')
    engine = Engine(model, place / "controlled.log", config=config)
    yield engine, root
    for name in ("hang", "flip", "fail"):
        (root / name).unlink(missing_ok=True)
    engine.close()


def test_a_flushed_prompt_is_restored_from_disk_and_answered_as_from_sglangs_own_cache(on_disk, place):
    first = store(on_disk, place / "blocks", "a")
    [own] = on_disk.ask(prompt("a", LONG))
    assert own.cached == WHOLE
    on_disk.flush()
    [restored] = on_disk.ask(prompt("a", LONG))
    assert restored == own
    assert restored.tokens == first.tokens
    assert restored.logprobs == pytest.approx(first.logprobs, abs=1e-3)


def test_prompts_that_share_a_beginning_share_its_pages_and_salts_keep_them_apart(on_disk, place):
    store(on_disk, place / "blocks", "shared")
    on_disk.flush()
    begun = prompt("shared", 10 * PAGE)
    [longer] = on_disk.ask([*begun, *prompt("else", 50)])
    assert longer.cached == 10 * PAGE
    on_disk.flush()
    [salted] = on_disk.ask(prompt("shared", LONG), cache_salt="one")
    assert salted.cached == 0


def test_prompts_that_come_together_are_all_restored(on_disk, place):
    first = [store(on_disk, place / "blocks", f"together {number}") for number in range(3)]
    on_disk.flush()
    answers = on_disk.ask(*(prompt(f"together {number}", LONG) for number in range(3)))
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in first]
    assert [answer.cached for answer in answers] == [WHOLE] * 3


def test_flipped_bits_on_disk_cost_hits_and_no_token(on_disk, place):
    known = set((place / "blocks").rglob("*"))
    first = store(on_disk, place / "blocks", "flipped")
    for file in set((place / "blocks").rglob("*")) - known:
        if file.is_file() and file.stat().st_size > 4096:
            data = bytearray(file.read_bytes())
            data[1000] ^= 1
            file.write_bytes(data)
    on_disk.flush()
    [again] = on_disk.ask(prompt("flipped", LONG))
    assert (again.tokens, again.cached) == (first.tokens, 0)
    assert again.logprobs == first.logprobs


def test_a_new_process_restores_and_after_new_weights_nothing_of_the_old_answers(
    on_disk, place, model, config, monkeypatch
):
    first = store(on_disk, place / "blocks", "new")
    monkeypatch.setenv("KVTIER_CONFIG", str(config))  # which turns kvtier on, without an argument
    engine = Engine(model, place / "new.log")
    try:
        [again] = engine.ask(prompt("new", LONG))
        assert (again.tokens, again.cached) == (first.tokens, WHOLE)
        other = save_model(place / "other", seed=1)
        engine.update_weights(other)
        [changed] = engine.ask(prompt("new", LONG))
        assert changed.cached == 0
        assert changed.tokens != first.tokens
        engine.ask(prompt("others", LONG))
        restore(engine, "others")
        engine.flush()
        engine.update_weights(model, flush_cache=False)
        assert engine.ask(prompt("others", LONG))[0].cached == 0  # the tier has it, of the weights before
        engine.flush()
        [back] = engine.ask(prompt("new", LONG))
        assert (back.tokens, back.cached) == (first.tokens, 0)
        assert engine.ask(prompt("others", LONG))[0].cached == 0
    finally:
        engine.close()


def test_a_wrong_bit_of_a_tier_costs_hits_and_no_token(controlled):
    engine, root = controlled
    first = store(engine, root, "wrong")
    assert restore(engine, "wrong").tokens == first.tokens
    engine.flush()
    (root / "flip").touch()
    [again] = engine.ask(prompt("wrong", LONG))
    (root / "flip").unlink()
    assert (again.tokens, again.cached) == (first.tokens, 0)
    assert restore(engine, "wrong").tokens == first.tokens


def test_a_tier_that_fails_costs_hits_and_no_token(controlled):
    engine, root = controlled
    first = store(engine, root, "failing")
    restore(engine, "failing")
    engine.flush()
    (root / "fail").touch()
    [again] = engine.ask(prompt("failing", LONG))
    (root / "fail").unlink()
    assert (again.tokens, again.cached) == (first.tokens, 0)


def test_a_tier_that_hangs_holds_no_request_up(controlled):
    engine, root = controlled
    first = store(engine, root, "hanging")
    restore(engine, "hanging")
    engine.flush()
    (root / "hang").touch()
    answers = [engine.ask(prompt(name, LONG))[0] for name in ("hanging", "others", "hanging")]
    (root / "hang").unlink()
    assert [answers[0].tokens, answers[2].tokens] == [first.tokens] * 2
    assert answers[0].cached == 0
    assert restore(engine, "hanging").tokens == first.tokens
