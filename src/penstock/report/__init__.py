"""Counters, profiles and predictions for people and for programs: these modules render, and compute nothing.

`metrics` is what Prometheus reads, `text` what a terminal shows, `document` JSON, `page` HTML with plots.
"""

from __future__ import annotations

from penstock.report.metrics import prometheus

__all__ = ["prometheus"]
