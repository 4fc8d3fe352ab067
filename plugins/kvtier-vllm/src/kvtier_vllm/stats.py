"""kvtier's figures in vLLM's types."""

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from kvtier_vllm.figures import FIGURES, PREFIX, Figures


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """What vLLM has to know of each metric before the first value comes."""
    kinds = {"counter": OffloadingCounterMetadata, "gauge": OffloadingGaugeMetadata}
    return {
        PREFIX + name: kinds[figure.kind](
            documentation=figure.help, labelnames=(figure.label,) if figure.label else ()
        )
        for name, figure in FIGURES.items()
    }


def take_stats(figures: Figures) -> OffloadingConnectorStats | None:
    """What changed since the last call, ``None`` when nothing did."""
    stats = OffloadingConnectorStats()
    for name, label, value in figures.take_changes():
        labels = (label,) if FIGURES[name].label else ()
        if FIGURES[name].kind == "counter":
            stats.increase_counter(PREFIX + name, value, labels)
        else:
            stats.set_gauge(PREFIX + name, float(value), labels)
    return None if stats.is_empty() else stats
