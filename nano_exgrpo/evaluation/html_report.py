"""A run as one page: curves, buckets, retired questions, and responses with each token coloured by its entropy.

    python -m nano_exgrpo.evaluation.html_report runs/NAME                   writes runs/NAME/report.html
    python -m nano_exgrpo.evaluation.html_report runs/NAME runs/BASELINE     with the curves of other runs beside its own

The page stands alone: no script, no network, no server. Responses are untrusted text and only ever shown as text;
the page's own policy forbids it to load or run anything. Train with --log-samples -1 to see every trajectory: with
fewer, the page can tell of retirements and earlier successes only what was logged.
"""

from __future__ import annotations

import argparse
import html
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from nano_exgrpo.errors import InputError
from nano_exgrpo.infra.files import read_json, write_text
from nano_exgrpo.infra.run_folder import read_lines

Points = list[tuple[float, float]]
Row = dict[str, Any]

# Metric, title, what to look for. A panel without data is left out.
PANELS = (
    ("eval/accuracy", "held-out accuracy", "The result. The band is its 95 % interval."),
    ("reward", "reward of fresh rollouts", "Noisy, and on ever harder questions as easy ones retire."),
    ("entropy", "entropy (nats a token)", "Should fall slowly. Near 0 nothing new is tried any more."),
    ("completions/mean_length", "response length (tokens)", "Growing while the reward stands still: look at the samples."),
    ("completions/clipped_ratio", "share cut at the length limit", "Above a few percent: raise --max-response-length."),
    ("trained_rows", "share of rows with a gradient", "Rows of groups that all succeed or all fail teach nothing."),
    ("grad_norm", "gradient norm", "Spikes: lower --lr. Beyond --grad-clip it is scaled down."),
    ("loss", "loss", "Near 0 by construction. It says nothing about progress."),
    ("clip_ratio", "share of fresh tokens clipped", "0 with one update a step; with more, a few percent."),
    ("replay/weight_mean", "replayed tokens: mean w* = π_θ/π_past", "Near 1 while the policy still says the same."),
    ("replay/ratio_mean", "replayed tokens: mean f(w*)", "1/(1+β) at w* = 1; lower where old successes are lost."),
    ("tokens_per_second", "fresh tokens a second", "Generation and update together."),
)  # fmt: skip
LONGEST = 600  # tokens of a response that are shown; the middle of a longer one is left out
INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)

STYLE = """
:root {
  color-scheme: light dark; --paper: #fff; --ink: #1c1e21; --dim: #5f6670; --line: #d9dce1; --card: #f6f7f9;
  --c0: #1f6feb; --c1: #d1570a; --c2: #17803d; --c3: #a333c8; --heat: 220, 80, 20; --good: #17803d; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171c; --ink: #e4e7eb; --dim: #98a1ad; --line: #333a44; --card: #1c2027;
  --c0: #6cabff; --c1: #ff9d5c; --c2: #57c97c; --c3: #d68cf0; --heat: 255, 130, 60; --good: #57c97c; --bad: #ff8078; } }
body { margin: 0 auto; max-width: 1180px; padding: 1.5rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1, h2 { line-height: 1.2; }
h2 { margin: 2.5rem 0 .6rem; }
p, small { color: var(--dim); max-width: 60rem; }
.ink { color: inherit; }
figure, details { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
figure { padding: .7rem .9rem; }
figcaption { font-weight: 600; }
figure small { display: block; min-height: 2.6em; line-height: 1.3; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 1rem; }
.wide { max-width: 680px; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--dim); font: 10px system-ui, sans-serif; }
.axis { stroke: var(--line); stroke-width: 1; }
.series { fill: none; stroke-width: 1.6; }
.key { display: inline-block; margin-right: .9rem; color: var(--dim); }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; border-radius: 2px; }
details { margin: .5rem 0; }
summary { cursor: pointer; padding: .5rem .9rem; }
.body { padding: 0 .9rem .7rem; }
.row { display: grid; grid-template-columns: 13.5rem 1fr; gap: .8rem; padding: .2rem 0; border-top: 1px solid var(--line); }
.replayed-row { border-left: 4px solid var(--c0); padding-left: .6rem; }
.text { font: 13px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
.token { border-radius: 3px; padding: .1em .15em; margin-right: 1px; background: rgba(var(--heat), var(--a)); }
.badge { border: 1px solid; border-radius: 4px; padding: 0 .35em; font-size: 12px; margin-right: .3em; }
.right { color: var(--good); }
.wrong { color: var(--bad); }
.replayed { color: var(--c0); font-weight: 600; }
table { border-collapse: collapse; }
td, th { text-align: left; padding: .15rem .9rem .15rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.scroll { max-height: 22rem; overflow: auto; }
#only:checked ~ .group:not(.with-replay) { display: none; }
"""


def escape(value: Any) -> str:
    """Untrusted text as HTML text: markup escaped, control and direction characters made visible."""
    visible = INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", str(value))
    return html.escape(visible)


# -------------------------------------------------------------------------------------------------- drawing


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers between low and high.

    >>> ticks(0, 100), ticks(0.31, 0.48)
    ([0, 50, 100], [0.35, 0.4, 0.45])
    """
    size = 10 ** math.floor(math.log10((high - low) / count))
    step = next(size * m for m in (1, 2, 5, 10) if size * m * count >= high - low)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def frame(
    x_range: tuple[float, float], y_range: tuple[float, float]
) -> tuple[str, Callable[[float], float], Callable[[float], float]]:
    """(SVG of axes and tick labels, x → pixel, y → pixel) in a box of 320 × 150."""
    (x0, x1), (y0, y1) = x_range, y_range
    px = lambda x: round(38 + 274 * (x - x0) / (x1 - x0), 1)  # noqa: E731
    py = lambda y: round(132 - 124 * (y - y0) / (y1 - y0), 1)  # noqa: E731
    parts = [
        f'<line class="axis" x1="38" x2="312" y1="{py(t)}" y2="{py(t)}"/>'
        f'<text x="34" y="{py(t) + 3}" text-anchor="end">{t:g}</text>'
        for t in ticks(y0, y1)
    ]
    parts += [f'<text x="{px(t)}" y="146" text-anchor="middle">{t:g}</text>' for t in ticks(x0, x1, 5)]
    return "".join(parts), px, py


def spread(values: Iterable[float]) -> tuple[float, float]:
    """A range for an axis that holds all values and is never empty."""
    values = list(values)
    low, high = min(values), max(values)
    if low == high:
        low, high = (0.0, 1.0) if low == 0 else sorted((0.9 * low, 1.1 * low))
    margin = 0.05 * (high - low)
    return (0.0 if 0 <= low < 0.3 * high else low - margin), high + margin


def svg(content: str, label: str) -> str:
    return f'<svg viewBox="0 0 320 152" role="img" aria-label="{escape(label)}">{content}</svg>'


def curve_panel(key: str, title: str, hint: str, runs: Sequence[tuple[str, list[Row]]]) -> str:
    """One metric of all runs over steps; empty where none has it."""
    series: list[Points] = [
        [
            (row["step"], float(row[key]))
            for row in rows
            if isinstance(row.get(key), (int, float)) and math.isfinite(row[key])
        ]
        for _, rows in runs
    ]
    points = [p for s in series for p in s]
    if len({x for x, _ in points}) < 2:
        return ""
    is_rate = key in ("eval/accuracy", "reward", "trained_rows")
    last = max(x for x, _ in points)
    axes, px, py = frame((0, last or 1), (0.0, 1.0) if is_rate else spread(y for _, y in points))
    parts = [axes]
    for number, ((_, rows), own) in enumerate(zip(runs, series)):
        colour = f"var(--c{number % 4})"
        if key == "eval/accuracy":
            bounds = [(row["step"], row["eval/low"], row["eval/high"]) for row in rows if row.get(key) is not None]
            outline = [(x, low) for x, low, _ in bounds] + [(x, high) for x, _, high in reversed(bounds)]
            parts.append(f'<polygon points="{path(outline, px, py)}" fill="{colour}" opacity="0.15"/>')
        parts.append(f'<polyline class="series" stroke="{colour}" points="{path(own, px, py)}"/>')
    words = f"<figcaption>{escape(title)}</figcaption><small>{escape(hint)}</small>"
    return f"<figure>{words}{svg(''.join(parts), title)}</figure>"


def path(points: Points, px: Callable[[float], float], py: Callable[[float], float]) -> str:
    return " ".join(f"{px(x)},{py(y)}" for x, y in points)


def bucket_colour(k: int, group_size: int) -> str:
    """Blue for hard questions (k = 1) over green to yellow for easy ones (k = K−1)."""
    share = (k - 1) / max(1, group_size - 2)
    return f"hsl({260 - 205 * share:.0f} 55% {42 + 16 * share:.0f}%)"


def bucket_panel(rows: list[Row], group_size: int) -> str:
    """Questions in the buffer by their latest number of successes, stacked, and retired ones on top, over steps."""
    ks = range(1, group_size)
    counts = [
        [float((row.get("buffer/buckets") or {}).get(str(k), 0)) for k in ks] + [float(row.get("buffer/retired") or 0)]
        for row in rows
    ]
    steps = [float(row["step"]) for row in rows]
    highest = max((sum(c) for c in counts), default=0)
    if not highest or len(steps) < 2:
        return ""
    axes, px, py = frame((0, steps[-1]), (0.0, highest * 1.05))
    parts, base = [axes], [0.0] * len(steps)
    for place in range(group_size):
        top = [b + c[place] for b, c in zip(base, counts)]
        outline = list(zip(steps, base)) + list(zip(reversed(steps), reversed(top)))
        fill = bucket_colour(place + 1, group_size) if place < group_size - 1 else "var(--dim)"
        parts.append(f'<polygon points="{path(outline, px, py)}" fill="{fill}" opacity="0.9"/>')
        base = top
    keys = "".join(
        f'<span class="key"><i style="background:{bucket_colour(k, group_size)}"></i>k = {k}</span>' for k in ks
    )
    keys += '<span class="key"><i style="background:var(--dim)"></i>retired</span>'
    return (
        "<figure><figcaption>questions by the successes k of their latest group</figcaption>"
        f"{svg(''.join(parts), 'buckets')}<div>{keys}</div></figure>"
    )


# ------------------------------------------------------------------------------------------------- samples


def group_samples(samples: Iterable[Row]) -> dict[tuple[int, str], list[Row]]:
    """(step, question id) → its logged trajectories, in the order in which they were written."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in samples:
        groups.setdefault((int(row["step"]), str(row["question"])), []).append(row)
    return groups


def retired_groups(groups: dict[tuple[int, str], list[Row]], started: set[int], group_size: int) -> dict[str, int]:
    """Question id → step in which its whole group succeeded, as far as whole groups were logged.

    started: the steps in which the buffer was being kept. A question that was kept to fill the batches counts too."""
    retired: dict[str, int] = {}
    for (step, question), rows in groups.items():
        if step in started and len(rows) >= group_size and all(row["reward"] > 0 for row in rows):
            retired.setdefault(question, step)
    return retired


def pick_groups(groups: dict[tuple[int, str], list[Row]], count: int) -> list[tuple[int, str]]:
    """At most `count` groups in order, spread over the run: half of them with a replayed row if there are so many."""
    with_replay = [key for key, rows in groups.items() if any(row["replayed"] for row in rows)]
    without = [key for key in groups if key not in set(with_replay)]
    replayed_share = max(count // 2, count - len(without))
    chosen = evenly(with_replay, replayed_share)
    chosen += evenly(without, count - len(chosen))
    place = {key: i for i, key in enumerate(groups)}
    return sorted(chosen, key=place.__getitem__)


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """`count` of the items, evenly spaced, first and last included; all of them if there are fewer.

    >>> evenly("abcdefg", 3)
    ['a', 'd', 'g']
    """
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(1, count - 1))] for i in range(count)]


def token_spans(row: Row, scale: float) -> str:
    """The response, each token on a background as strong as its entropy; plain text where tokens are missing."""
    tokens, entropies = row.get("tokens") or [], row.get("token_entropies") or []
    if not tokens or len(tokens) != len(entropies):
        return escape(row.get("response", ""))
    alpha = lambda entropy: 0.75 * min(1.0, max(0.0, entropy) / scale)  # noqa: E731
    spans = [
        f'<span class="token" style="--a:{alpha(float(e)):.2f}" title="{float(e):.2f} nats">{escape(t) or "&#8709;"}</span>'
        for t, e in zip(tokens, entropies)
    ]
    if len(spans) > LONGEST:
        spans[LONGEST // 2 : -LONGEST // 2] = [f" … <i>{len(spans) - LONGEST} tokens left out</i> … "]
    return "".join(spans)


def trajectory(row: Row, scale: float, earlier: list[Row]) -> str:
    """One response. earlier: logged successes of its question in earlier steps."""
    badges = [
        '<span class="badge right">right</span>' if row["reward"] > 0 else '<span class="badge wrong">wrong</span>'
    ]
    if row["replayed"]:
        badges.append('<span class="badge replayed">replayed</span>')
    if row.get("truncated"):
        badges.append('<span class="badge wrong">cut off</span>')
    note = ""
    if row["replayed"]:
        born = next((e for e in earlier if e.get("tokens") == row.get("tokens") and not e["replayed"]), None)
        others = sorted(
            {(e["step"], e["entropy"]) for e in earlier if e.get("tokens") != row.get("tokens") and not e["replayed"]}
        )
        note = (
            f"<br><small>generated in step {born['step']}, entropy then {born['entropy']:.3f}"
            if born
            else "<br><small>generated in a step that was not logged"
        )
        if others:
            note += "; other successes when generated: " + ", ".join(
                f"{entropy:.3f} (step {step})" for step, entropy in others[:6]
            )
            note += f" and {len(others) - 6} more" if len(others) > 6 else ""
        note += "</small>"
    return (
        f'<div class="row{" replayed-row" if row["replayed"] else ""}"><div>{"".join(badges)}'
        f"<small>{float(row['entropy']):.3f} nats</small></div>"
        f'<div><span class="text">{token_spans(row, scale)}</span>{note}</div></div>'
    )


def sample_section(samples: list[Row], count: int) -> str:
    """The logged groups, at most `count` of them, each folded away under a line of its own."""
    groups = group_samples(samples)
    if not groups:
        return "<p>No samples were logged (--log-samples 0).</p>"
    entropies = sorted(float(e) for row in samples for e in row.get("token_entropies") or [])
    scale = max(0.5, entropies[int(0.98 * (len(entropies) - 1))]) if entropies else 1.0
    successes: dict[str, list[Row]] = {}
    for row in samples:
        if row["reward"] > 0:
            successes.setdefault(str(row["question"]), []).append(row)
    shown = pick_groups(groups, count)
    legend = "".join(f'<span class="token" style="--a:{0.75 * a / 4:.2f}">{a / 4 * scale:.2f}</span>' for a in range(5))
    parts = [
        f"<p class=ink>{len(shown)} of {len(groups)} logged groups, spread over the run. Each token's background is the "
        f'entropy, in nats, of the distribution it was drawn from: <span class="text">{legend}</span>. A replayed row '
        f"(blue) is from an earlier step; the entropy shown is under the policy that chose it, and it was the lowest among "
        f"the stored successes of its question unless the run says otherwise (--trajectory-choice).</p>"
        f'<input type="checkbox" id="only"> <label for="only">only groups with a replayed trajectory</label>'
    ]
    for number, key in enumerate(shown):
        step, question = key
        rows = groups[key]
        k = sum(row["reward"] > 0 for row in rows)
        with_replay = any(row["replayed"] for row in rows)
        earlier = [row for row in successes.get(question, []) if row["step"] < step]
        body = "".join(trajectory(row, scale, earlier) for row in rows)
        classes, mark = ("group with-replay", " · <b class=replayed>replayed</b>") if with_replay else ("group", "")
        parts.append(
            f'<details class="{classes}"{" open" if number in (0, len(shown) - 1) else ""}>'
            f"<summary>step {step} · {escape(question)} · {k} of {len(rows)} right{mark}</summary>"
            f'<div class="body"><p class="text">{escape(rows[0].get("prompt", ""))}</p>{body}</div></details>'
        )
    return "".join(parts)


# ---------------------------------------------------------------------------------------------------- page


def build_page(folders: Sequence[Path], *, most_groups: int = 40) -> str:
    """The report of the first run, with the others' curves beside its own.

    Raises InputError when a folder is no run or has no metrics."""
    config = read_json(folders[0] / "config.json", str(folders[0]))
    runs = [(folder.resolve().name, read_lines(folder / "metrics.jsonl")) for folder in folders]
    for folder, (_, rows) in zip(folders, runs):
        if not rows:
            raise InputError(f"{folder} has no metrics.jsonl with a finished step; train first")
    name, rows = runs[0]
    samples = read_lines(folders[0] / "samples.jsonl")
    group_size = int(config.get("group_size", 8))
    measured = [row for row in rows if row.get("eval/accuracy") is not None]

    lead = f"{escape(config.get('algo'))} on {escape(config.get('model'))}, {rows[-1]['step']} steps"
    if measured:
        first, last = measured[0], measured[-1]
        lead += (
            f"; held-out accuracy {first['eval/accuracy']:.3f} → <b>{last['eval/accuracy']:.3f}</b> "
            f"[{last['eval/low']:.3f}, {last['eval/high']:.3f}] on {last['eval/questions']} questions"
        )
    keys = "".join(
        f'<span class="key"><i style="background:var(--c{i % 4})"></i>{escape(n)}</span>'
        for i, (n, _) in enumerate(runs)
    )
    panels = "".join(curve_panel(*panel, runs) for panel in PANELS)
    buckets = bucket_panel(rows, group_size)
    started = {row["step"] for row in rows if row.get("replay/started")}
    retired = retired_groups(group_samples(samples), started, group_size) if config.get("retire", True) else {}
    count = rows[-1].get("buffer/retired") or 0
    prompts = {str(row["question"]): row.get("prompt", "") for row in samples}
    table = "".join(
        f"<tr><td>{step}</td><td>{escape(id)}</td><td>{escape(prompts[id])}</td></tr>" for id, step in retired.items()
    )
    if retired:
        head = "<tr><th>step</th><th>question</th><th>prompt</th></tr>"
        table = f'<div class="scroll"><table>{head}{table}</table></div>'
    settings = "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in config.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,"><title>{escape(name)}</title><style>{STYLE}</style></head><body>
<h1>{escape(name)}</h1><p>{lead}</p>
<h2>Curves</h2><p>{keys if len(runs) > 1 else ""}</p><div class="grid">{panels}</div>
<h2>The buffer</h2><div class="wide">{buckets or "<p>Nothing was stored: no replay in this run.</p>"}</div>
<h2>Retired questions</h2>
<p>{count} retired: all {group_size} trajectories of their group succeeded. {len(retired)} of them were logged whole:</p>
{table}
<h2>Trajectories</h2>{sample_section(samples, most_groups)}
<h2>Settings</h2><details><summary>config.json</summary><div class="body"><table>{settings}</table></div></details>
</body></html>
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("nano_exgrpo.evaluation.html_report", description="Write a run's report.html.")
    parser.add_argument("runs", nargs="+", type=Path, help="the run's folder; then others to compare its curves with")
    parser.add_argument("--groups", type=int, default=40, help="most groups of trajectories to show (default 40)")
    parser.add_argument("--out", type=Path, help="the file to write (default: report.html in the run's folder)")
    options = parser.parse_args(argv)
    target = options.out or options.runs[0] / "report.html"
    try:
        page = build_page(options.runs, most_groups=max(0, options.groups))
        write_text(target, page)
    except InputError as error:
        print(f"htmlreport: {error}", file=sys.stderr)
        return 2
    except (KeyError, TypeError) as error:
        files = f"metrics.jsonl or samples.jsonl of {', '.join(map(str, options.runs))}"
        print(
            f"htmlreport: a row of {files} is not as train.py writes it ({error!r}); put right what was changed in it",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        print(
            f"htmlreport: {target} cannot be written ({error.strerror}); name another file with --out",
            file=sys.stderr,
        )
        return 2
    print(f"{target}: open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
