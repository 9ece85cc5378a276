"""What `survey` found, for people."""

from __future__ import annotations

from typing import Any

from llamamg.devices.order import WORTH

GIB = 2**30
PATHS = {
    "ggml": "as a decode copies",
    "driver": "CUDA, peer access off",
    "peer": "CUDA, peer access on",
    "pinned": "through pinned host memory",
}


def lines(found: dict[str, Any]) -> list[str]:
    """The survey as text."""
    out = ["", "Devices"]
    for device in found["devices"]:
        free, total = device["memory_free"] / GIB, device["memory_total"] / GIB
        out.append(
            f"  {device['name']:<8} {free:.1f} of {total:.1f} GiB free, reads {device['read_gb_s']:.1f} GB/s, "
            f"multiplies {device['matrix_tflop_s']:.3g} TFLOP/s, starts an operation in {device['op_us']:.1f} µs"
        )
    out += ["", "Hops"]
    for hop in found["hops"]:
        out.append(
            f"  {hop['from']:<8} -> {hop['to']:<8} {hop['latency_us']:8.1f} µs {hop['gb_s']:8.1f} GB/s  {PATHS[hop['path']]}"
        )
    if found["hops_note"]:
        out.append(f"  {found['hops_note']}")
    return [*out, *_stages(found), *_advice(found)]


def _stages(found: dict[str, Any]) -> list[str]:
    if "stages" not in found:
        return []
    out = ["", f"Stages of {found['model']['file']} ({found['stages_note']})"]
    for stage in found["stages"]:
        held = f"{stage['n_layers']} layers{' and the head' if stage['has_head'] else ''}"
        text = f"  {stage['device']:<8} {held:<24} {stage['weights_bytes'] / GIB:6.2f} GiB of weights, "
        text += f"{stage['context_bytes'] / GIB:.2f} GiB of context"
        for phase, what in (("decode", "a token"), ("prefill", "a ubatch")):
            if f"{phase}_ms" in stage:
                text += f"; {what} {stage[f'{phase}_ms']:.2f} ms"
        out.append(text)
    if found.get("host"):
        out.append("  Tables of which a token reads a row stay in main memory and are in no stage.")
    return out


def _advice(found: dict[str, Any]) -> list[str]:
    out = []
    order, split = found.get("order"), found.get("split")
    if order is not None:
        if order["is_present"]:
            names = ", ".join(order["devices"])
            out.append(f"  order    {names}: as it is now, nothing better by {100 * WORTH:.0f} % was found")
        else:
            costs = f"{order['present_ms']} -> {order['cost_ms']} ms"
            out.append(f"  order    {order['how']}: {costs} (slowest stage and hops)")
            if order["tensor_split"]:
                out.append(f"           --tensor-split auto is {order['tensor_split']} then")
    if split is not None and len(found["devices"]) > 1:
        out.append(f"  split    --tensor-split auto, now {split['sentence']}")
    return ["", "Advice", *out] if out else []
