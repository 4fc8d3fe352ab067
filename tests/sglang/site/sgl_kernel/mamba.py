"""Kernels of recurrent layers. SGLang asks for them by name, and the tests' models call none: they fail if they do."""

from sgl_kernel import __getattr__ as __getattr__  # noqa: PLC0414 - whatever the name is
from sgl_kernel.attention import LIBRARY

for _name in ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu"):
    LIBRARY.define(f"{_name}(Tensor unneeded) -> Tensor")
