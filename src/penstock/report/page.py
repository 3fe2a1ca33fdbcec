"""A diagnosis as one HTML page that needs no network and no script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from penstock import __version__
from penstock.findings import Finding, findings
from penstock.profile import Evidence, Profile
from penstock.report import plots, svg
from penstock.report.words import duration, evidence, gain, limit, parts, rate, rates, setting
from penstock.units import bytes_text
from penstock.whatif import Case, as_it_is, outlook, predict

__all__ = ["diagnosis_page"]

_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,"Segoe UI",Helvetica,Arial,sans-serif;
-webkit-text-size-adjust:100%;overflow-wrap:anywhere}
main{max-width:1180px;margin:0 auto;padding:32px 20px 48px}
h1{font-size:27px;line-height:1.25;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:17px;margin:0 0 12px}
p{margin:0}
.soft{color:var(--soft)}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;margin-top:16px}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:16px;margin-top:16px;align-items:start}
.two>.card{margin-top:0;min-width:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:16px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px;
border-left:4px solid var(--c,var(--line))}
.tile b{display:block;font-size:24px;font-weight:650;font-variant-numeric:tabular-nums;line-height:1.2}
.tile span{font-size:13px;color:var(--soft);line-height:1.35;display:block}
.split{display:flex;height:40px;border-radius:7px;overflow:hidden;gap:2px}
.split i{background:var(--c);min-width:3px;color:#fff;font-style:normal;font-weight:600;font-size:15px;line-height:40px;
text-align:center;overflow:hidden}
.split .prep{color:#1c1400}
@media (prefers-color-scheme:dark){.split i{color:#12161c}}
.keys{display:flex;flex-wrap:wrap;gap:8px 26px;margin:14px 0 0;padding:0;list-style:none}
.keys li{font-variant-numeric:tabular-nums}
.keys i{display:inline-block;width:12px;height:12px;border-radius:3px;background:var(--c);margin-right:8px}
ol{margin:0;padding:0;list-style:none;counter-reset:n}
ol>li{counter-increment:n;padding:12px 0 12px 44px;border-top:1px solid var(--line);position:relative}
ol>li:first-child{border-top:0;padding-top:2px}
ol>li::before{content:counter(n);position:absolute;left:0;top:13px;width:27px;height:27px;border-radius:50%;
background:var(--c);color:var(--card);font-weight:650;font-size:14px;line-height:27px;text-align:center}
ol>li:first-child::before{top:3px}
li.invalid{--c:var(--fetch)}li.stall{--c:var(--prep)}li.fact{--c:var(--compute)}
.what{font-weight:600}
ul.do{margin:6px 0 0;padding-left:18px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:6px 10px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{color:var(--soft);font-weight:500}
td:first-child,th:first-child,td:last-child,th:last-child{text-align:left}
td:first-child{padding-left:0}th:first-child{padding-left:0}
tr:last-child td{border-bottom:0}
.ops{display:grid;grid-template-columns:max-content 1fr max-content;gap:7px 12px;align-items:center;font-size:14px}
.ops i{display:block;height:16px;border-radius:3px;background:var(--prep)}
figure{margin:0}
.note{margin-top:8px;font-size:13px;color:var(--soft)}
footer{margin-top:24px;font-size:13px;color:var(--soft)}
"""


def diagnosis_page(profile: Profile, checks: Sequence[plots.Check] = ()) -> str:
    """The page. `checks`: rates that were measured in other setups, shown beside their predictions."""
    found = findings(profile)
    title = f"{profile.script}: where the time goes"
    sections = [
        f"<h1>{escape(_verdict(profile, found))}</h1><p class=soft>{escape(profile.script)}: "
        f"{escape(setting(profile))}</p>",
        _split(profile),
        _tiles(profile),
        _findings(profile, found),
        _plots(profile, checks),
        _cases(outlook(profile)),
        _evidence(profile),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{svg.STYLE}{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(section for section in sections if section)
        + f"\n<footer>Penstock {__version__}. Rates are samples per second"
        f"{' of each rank' if profile.ranks > 1 else ''}. GB is 10<sup>9</sup> bytes.</footer>\n</main></body></html>\n"
    )


def _verdict(profile: Profile, found: Sequence[Finding]) -> str:
    """The first thing to know."""
    invalid = next((one.what for one in found if one.weight == "invalid"), None)
    step_s = sum(seconds for _, _, seconds in parts(profile.split))
    waiting = 1 - profile.split.compute_s / step_s if step_s > 0 else 0.0
    if invalid is not None:
        return f"Not to be trusted yet: {invalid}"
    if waiting < 0.05:
        return f"The data keeps up: {1 - waiting:.0%} of the time is spent computing"
    return f"{waiting:.0%} of the time is spent waiting for data"


def _card(title: str, content: str) -> str:
    return f"<section class=card><h2>{escape(title)}</h2>{content}</section>"


def _split(profile: Profile) -> str:
    step_s = sum(seconds for _, _, seconds in parts(profile.split)) or 1.0
    shown = [(key, name, seconds, seconds / step_s) for key, name, seconds in parts(profile.split)]
    label = ", ".join(f"{name} {share:.0%}" for _, name, _, share in shown)
    bar = "".join(
        f'<i class="{key} mark" style="flex:{share:.5f} 1 0" title="{escape(name)}: {share:.1%}">{_short(share)}</i>'
        for key, name, _, share in shown
        if share >= 0.0005
    )
    keys = "".join(
        f"<li><i class={key}></i>{escape(name)} <b>{share:.0%}</b> <span class=soft>{duration(seconds)}</span></li>"
        for key, name, seconds, share in shown
    )
    return _card(
        f"A step: {duration(step_s)}",
        f'<div class=split role=img aria-label="{escape(label)}">{bar}</div><ul class=keys>{keys}</ul>',
    )


def _short(share: float) -> str:
    """What fits into a part of the bar."""
    return f"{share:.0%}" if share >= 0.06 else ""


def _tiles(profile: Profile) -> str:
    colours = {"G": "compute", "P": "prep", "S": "fetch", "F": "fetch"}
    now = predict(profile, as_it_is(profile))
    tiles = [(colours.get(symbol, ""), symbol, per_s, what) for symbol, per_s, what in rates(profile, now)]
    tiles.append(("ink", "measured", profile.rate_samples_per_s, "end to end, caches as they were"))
    return (
        "<div class=tiles>"
        + "".join(
            f'<div class="tile {colour}"><span>{escape(symbol)}, samples/s</span><b>{rate(per_s)}</b>'
            f"<span>{escape(what)}</span></div>"
            for colour, symbol, per_s, what in tiles
        )
        + "</div>"
    )


def _findings(profile: Profile, found: Sequence[Finding]) -> str:
    if not found:
        return _card("Findings", "<p>Nothing to improve was found.</p>")
    return _card("Findings, worst first", f"<ol>{''.join(_finding(profile, one) for one in found)}</ol>")


def _finding(profile: Profile, finding: Finding) -> str:
    figures = "; ".join(evidence(*figure) for figure in finding.evidence.items())
    remedies = "".join(f"<li>{_after(profile, one.action, one.samples_per_s)}</li>" for one in finding.remedies)
    return (
        f'<li class="{finding.weight}"><span class=what>{escape(finding.what)}</span>'
        + (f"<div class=soft>{escape(figures)}</div>" if figures else "")
        + (f"<ul class=do>{remedies}</ul>" if remedies else "")
        + "</li>"
    )


def _after(profile: Profile, action: str, samples_per_s: float | None) -> str:
    if samples_per_s is None:
        return escape(action)
    change = gain(samples_per_s, profile.rate_samples_per_s)
    return f"{escape(action)}: <b>{rate(samples_per_s)} samples/s</b>{f' ({change})' if change else ''}"


def _plots(profile: Profile, checks: Sequence[plots.Check]) -> str:
    cards = [
        _card(title, f"<figure>{plot}</figure>")
        for title, plot in (
            ("Rate against cache size", plots.by_cache(profile, checks)),
            ("Rate against workers", plots.by_workers(profile, checks)),
            ("Waiting, step by step", plots.waiting(profile)),
            ("Preparing, by operator", _operators(profile)),
        )
        if plot
    ]
    return f"<div class=two>{''.join(cards)}</div>"


def _operators(profile: Profile) -> str | None:
    ranked = plots.by_operator(profile)
    if not ranked:
        return None
    most = ranked[0][1]
    rows = "".join(
        f'<span>{escape(name)}</span><i class=mark style="width:{share / most:.2%}"></i>'
        f"<span>{share:.0%} <span class=soft>{time}</span></span>"
        for name, share, time in ranked
    )
    return f"<div class=ops>{rows}</div>"


def _cases(cases: Sequence[Case]) -> str:
    base = cases[0].prediction.total_samples_per_s
    heads = ("what if", "workers", "cached", "G", "P", "F", "samples/s", "", "held by")
    rows = [
        (
            case.label,
            str(case.prediction.setup.workers),
            f"{case.prediction.setup.cached_share:.0%}",
            rate(case.prediction.gpu_samples_per_s),
            rate(case.prediction.prep_samples_per_s),
            "" if case.prediction.fetch_samples_per_s is None else rate(case.prediction.fetch_samples_per_s),
            rate(case.prediction.total_samples_per_s),
            gain(case.prediction.total_samples_per_s, base),
            limit(case.prediction),
        )
        for case in cases
    ]
    notes = dict.fromkeys(note for case in cases for note in case.prediction.notes)
    under = "".join(f"<p class=note>{escape(note)}.</p>" for note in notes)
    return _card("What if", _table(heads, rows) + under)


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<div class=scroll><table>{row(heads, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table></div>"


def _evidence(profile: Profile) -> str:
    rows = [
        (what, *_counted(counted), verdict)
        for what, counted, verdict in (
            ("P, C: from memory", profile.prep_evidence, _yes(profile.in_memory)),
            ("S: caches cold", profile.storage_evidence, _yes(profile.cold)),
            ("the training as it is", profile.watch_evidence, ""),
        )
        if counted is not None
    ]
    table = _table(("phase", "requested", "from the device", "counter", "as it should be"), rows) if rows else ""
    return _card("How it is known", table + "".join(_notes(profile)))


def _counted(counted: Evidence) -> tuple[str, str, str]:
    device = "not known" if counted.device_bytes is None else bytes_text(counted.device_bytes)
    return bytes_text(counted.requested_bytes), device, counted.counter or "none"


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "not known"}[value]


def _notes(profile: Profile) -> Iterator[str]:
    yield f"<p class=note>{profile.steps_per_phase} steps for each phase.</p>"
    for note in profile.notes:
        yield f"<p class=note>{escape(note)}</p>"
