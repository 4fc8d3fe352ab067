"""What a test wants of vLLM on a CPU, where vLLM leaves it out."""

from contextlib import nullcontext
from unittest.mock import patch


def schedule_asynchronously(*, has_streams=False):
    """Let vLLM schedule asynchronously on a CPU, as it does on GPUs: each step is scheduled before the last one's end.

    It switches that off there, though only the order of CUDA's streams and events needs a GPU: on a CPU every copy is
    over when its call returns, so that streams and events have nothing to wait for. A simulated GPU *has_streams*.
    """
    from vllm.platforms.cpu import CpuPlatform

    class Over:
        """A stream or an event that never has anything to wait for."""

        def __init__(self, *arguments, **options): ...
        def record(self, *arguments): ...
        def synchronize(self): ...
        def wait_stream(self, stream): ...

    if not has_streams:
        patch.multiple("torch.cuda", Event=Over, Stream=Over, current_stream=Over, stream=nullcontext).start()
    update = CpuPlatform.check_and_update_config

    def check_and_update_config(cls, config):
        update(config)
        config.scheduler_config.async_scheduling = True

    patch.object(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config)).start()


def forget_costs():
    """Let no load be given up as too slow: a tiny model computes a prompt sooner than a busy disk loads it."""
    patch("kvtier_vllm.steps.StepCost.add", lambda *_: None).start()


def cache_prefixes_of_mla():
    """Let vLLM cache the prefixes of latent attention on any CPU.

    It does so with AMX alone: elsewhere its kernels for cached and for new tokens round differently.
    """
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config

    def check_and_update_config(cls, config):
        update(config)
        config.cache_config.enable_prefix_caching = True
        config.scheduler_config.enable_chunked_prefill = True

    patch.object(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config)).start()


def complete_stage(worker):
    """Make what vLLM's runner for CPUs makes only when it compiles: a place for what the stage before computed."""
    runner = worker.model_runner
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
        )
