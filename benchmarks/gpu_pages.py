"""Tables and plots of what `benchmarks.gpu` recorded, for docs/gpu.md. Measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

__all__ = ["plots", "section", "summary", "title"]

Record = dict[str, Any]

NAMES = {
    "synthetic": "the same batch (G)",
    "torch": "torch DataLoader",
    "rough": "a thread and decode_jpeg",
    "dali": "DALI, engine 0.65",
    "dali:1.0": "DALI, engine 1.0",
    "dali:0.12": "DALI, engine 0.12",
    "penstock": "Penstock",
    "penstock:device=cpu": "Penstock, CPU lanes only",
    "process": "Penstock in another process",
    "ablation:none": "nothing ahead of time",
    "ablation:ahead": "+ ahead of time",
    "ablation:affinity": "+ affinity",
    "ablation:threshold": "+ threshold",
}
MODELS = {
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "vit_b_16": "ViT-B/16",
    "alexnet": "AlexNet",
    "mobilenet_v2": "MobileNetV2",
    "m5": "M5 (audio)",
    "none": "the loaders alone",
}


def title(record: Record) -> str:
    """A part, in a line."""
    part = record["settings"]
    how = {"": "eager", "default": "compiled"}.get(part["compile"], f"compiled ({part['compile']})")
    words = [MODELS.get(part["model"], part["model"])]
    words += [how] if part["model"] != "none" else []
    words += [f"batch {part['batch']}", f"{part['cores']} cores"]
    if part["model"] != "m5":
        words += ["x".join(map(str, part["image_size"]))]
        words += ["RandAugment"] if part["augment"] == "rand" else ["default augmentation"]
    words += [f"{part['progressive']:.0%} progressive"] if part["progressive"] else []
    return ", ".join(words)


def summary(records: Mapping[str, Record]) -> Iterator[str]:
    """Markdown for the README: the ratio to G of each training with Penstock, beside torch and the best of DALI's."""
    rows = [cells for record in records.values() if (cells := _summed(record)) is not None]
    if rows:
        yield "| training, as a ratio to what the GPU does alone | torch DataLoader | DALI | Penstock |"
        yield "| --- | ---: | ---: | ---: |"
        yield from (f"| {name} | {torch} | {dali} | **{penstock}** |" for name, torch, dali, penstock in rows)


def _summed(record: Record) -> tuple[str, str, str, str] | None:
    ratios = {name: statistics.median(values) for name, values in _bars(record)} if _key(record) == "ratio" else {}
    if "penstock" not in ratios:
        return None
    dali = [ratio for name, ratio in ratios.items() if name.partition(":")[0] == "dali"]
    cells = [ratios.get("torch"), max(dali, default=None), ratios["penstock"]]
    first, second, third = ("" if ratio is None else f"{ratio:.2f}" for ratio in cells)
    return title(record), first, second, third


def section(records: Mapping[str, Record]) -> str:
    """Markdown: a table for each part."""
    lines: list[str] = []
    for name, record in records.items():
        lines += [f"### {title(record)}", "", *([f"![{title(record)}]({name}.svg)", ""] if _bars(record) else [])]
        lines += [*_table(record), "", _where(record), ""]
    return "\n".join(lines).rstrip()


def plots(records: Mapping[str, Record]) -> dict[str, str]:
    """File name to SVG: for trainings the ratio to G, for loaders alone images per second."""
    return {f"{name}.svg": _plot(record) for name, record in records.items() if _bars(record)}


def _values(row: Record, key: str) -> list[float]:
    return [sample[key] for sample in row["samples"] if key in sample]


def _key(record: Record) -> str:
    return "alone_images_per_s" if record["settings"]["model"] == "none" else "ratio"


def _bars(record: Record) -> list[tuple[str, list[float]]]:
    """Contenders with figures, and these."""
    rows = ((row["name"], _values(row, _key(record))) for row in record["rows"] if row["name"] != "synthetic")
    return [(name, values) for name, values in rows if values]


_HEADS = {
    "g": "G, images/s",
    "alone_images_per_s": "alone, images/s",
    "images_per_s": "training, images/s",
    "ratio": "ratio to G",
    "cores": "cores in use",
    "loader_gpu_mib": "GPU memory, MiB",
}
_FORMS = {"ratio": "{:.3f}", "cores": "{:.1f}"}


def _table(record: Record) -> Iterator[str]:
    keys = [key for key in _HEADS if any(_values(row, key) for row in record["rows"])]
    yield "| | " + " | ".join(_HEADS[key] for key in keys) + " |"
    yield "| --- |" + " ---: |" * len(keys)
    for row in record["rows"]:
        name = NAMES.get(row["name"], row["name"])
        cells = [_median(_values(row, key), _FORMS.get(key, "{:,.0f}")) for key in keys]
        cells = ["failed", *cells[1:]] if row["error"] and not row["samples"] else cells
        yield f"| {f'**{name}**' if row['name'] == 'penstock' else name} | " + " | ".join(cells) + " |"


def _median(values: list[float], form: str) -> str:
    return form.format(statistics.median(values)) if values else ""


def _where(record: Record) -> str:
    part = record["settings"]
    machine = part["machine"]
    rounds = max((len(row["samples"]) for row in record["rows"]), default=0)
    on = machine.get("gpu", "the CPU")
    return (
        f"{on}, torch {machine['torch']}, files of {part['mean_file_bytes'] / 1000:.0f} KB; "
        f"medians of {rounds} {'round' if rounds == 1 else 'rounds'} of {part['seconds']:g} s, contenders in turn."
    )


def _plot(record: Record) -> str:
    bars, ratio = _bars(record), _key(record) == "ratio"
    most = max(1.0 if ratio else 0.0, *(max(values) for _, values in bars))
    left, width, step = 230, 430, 28
    height = 56 + step * len(bars)
    what = "ratio to what the GPU does alone" if ratio else "images per second"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="760" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="15" fill="#222">{escape(title(record))}: {what}</text>',
    ]
    for index, (name, values) in enumerate(bars):
        parts += _bar(name, values, 44 + step * index, left, width / most, "{:.3f}" if ratio else "{:,.0f}")
    if ratio:
        parts.append(f'<path d="M{left + width / most:.1f} 38V{height - 8}" stroke="#b04a3a" stroke-dasharray="4 3"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(name: str, values: list[float], y: int, left: int, scale: float, form: str) -> Iterator[str]:
    """The median; the whisker spans all rounds."""
    median, ends = statistics.median(values), [left + scale * value for value in (min(values), max(values))]
    fill = "#1f6f8b" if name == "penstock" else "#a9b7bd"
    yield f'<text x="{left - 8}" y="{y + 14}" text-anchor="end" fill="#222">{escape(NAMES.get(name, name))}</text>'
    yield f'<rect x="{left}" y="{y}" width="{scale * median:.1f}" height="19" fill="{fill}"/>'
    yield f'<path d="M{ends[0]:.1f} {y + 9.5}H{ends[1]:.1f}" stroke="#222" stroke-width="1.5"/>'
    yield f'<text x="672" y="{y + 14}" fill="#222">{form.format(median)}</text>'
