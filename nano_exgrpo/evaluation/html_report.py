"""A run as one page: its curves, its buffer, and its responses with each token coloured by its entropy.

    python -m nano_exgrpo.evaluation.html_report runs/NAME                 writes runs/NAME/report.html
    python -m nano_exgrpo.evaluation.html_report runs/NAME runs/OTHER      the curves of both in one picture

The page stands alone: no script, no network, no server. Responses are untrusted text and only ever shown as text, and
the page's own policy forbids it to load or run anything. Train with --log-samples -1 to see every trajectory.
"""

from __future__ import annotations

import argparse
import html
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy

from nano_exgrpo.errors import InputError
from nano_exgrpo.evaluation.statistics import Interval
from nano_exgrpo.evaluation.study_report import draw_buffer, picture, pyplot
from nano_exgrpo.infra.files import read_json, read_rows, write_text

Row = dict[str, Any]
Run = tuple[str, Row, list[Row]]  # name, settings, metrics

# Metric, title, what to look for. A panel without data stays empty.
PANELS = (
    ("eval/accuracy", "held-out accuracy", "The result. The band is its 95 % interval."),
    ("reward", "reward of fresh rollouts", "Noisy, and on ever harder questions as easy ones retire."),
    ("entropy", "entropy (nats a token)", "Should fall slowly. Near 0 nothing new is tried."),
    (
        "completions/mean_length",
        "response length (tokens)",
        "Grows while the reward stands still: look at the samples.",
    ),
    ("completions/clipped_ratio", "share cut at the length limit", "Above a few %: raise --max-response-length."),
    ("trained_rows", "share of rows with a gradient", "Groups that all succeed or all fail teach nothing."),
    ("grad_norm", "gradient norm", "Spikes: lower --lr. Beyond --grad-clip it is scaled down."),
    ("loss", "loss", "Near 0 by construction. It says nothing about progress."),
    ("clip_ratio", "share of fresh tokens clipped", "0 with one update a step; with more, a few %."),
    ("replay/weight_mean", "replayed tokens: mean w* = π_θ/π_past", "Near 1 while the policy still says the same."),
    ("replay/ratio_mean", "replayed tokens: mean f(w*)", "1/(1+β) at w* = 1; lower where successes are lost."),
)
COLOURS = "#1f77b4 #ff7f0e #2ca02c #d62728 #9467bd #8c564b #e377c2 #7f7f7f #bcbd22 #17becf".split()
GROUPS_SHOWN = 40
LONGEST = 600  # tokens of a response that are shown; the middle of a longer one is left out
INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
STYLE = """
:root { color-scheme: light dark; --line: #8885; --heat: 230, 100, 40; }
body { margin: 0 auto; max-width: 1180px; padding: 1.5rem; font: 15px/1.5 system-ui, sans-serif; }
svg { width: 100%; height: auto; }
small { opacity: .7; }
details { margin: .5rem 0; border: 1px solid var(--line); border-radius: 8px; padding: .4rem .9rem; }
summary { cursor: pointer; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; }
.row { display: grid; grid-template-columns: 13rem 1fr; gap: .8rem; border-top: 1px solid var(--line); }
.text { font: 13px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
.token { border-radius: 3px; padding: .1em .15em; margin-right: 1px; background: rgba(var(--heat), var(--a)); }
.right { color: #1a8f47; } .wrong { color: #d0342c; } .replayed { color: #2f7de1; font-weight: 600; }
td, th { text-align: left; padding: .1rem .9rem .1rem 0; border-bottom: 1px solid var(--line); }
#only:checked ~ .group:not(.with-replay) { display: none; }
"""


def visible(text: str) -> str:
    """Control and direction characters, and half surrogates, spelled out: untrusted text for a terminal or a page."""
    return INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def escape(value: Any) -> str:
    """Untrusted text as HTML text."""
    return html.escape(visible(str(value)))


def read_run(folder: Path) -> Run:
    """Raises InputError where the folder is no run or has no metrics."""
    config = read_json(folder / "config.json", f"{folder} is not a run folder")
    rows = read_rows(folder / "metrics.jsonl")
    if not rows:
        raise InputError(f"{folder} has no metrics.jsonl with a finished step; train first")
    return folder.resolve().name, config, rows


def column(rows: Sequence[Row], key: str) -> Any:
    """The values of one metric [rows]; NaN where a row has none, which leaves a gap in its curve."""
    return numpy.array([row.get(key) for row in rows], dtype=float)


# -------------------------------------------------------------------------------------------------- curves


def draw_curves(runs: Sequence[Run]) -> str:
    """One SVG: a panel for each metric with the curves of all runs, and the first run's buffer."""
    dim = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#888888")
    with pyplot().rc_context({**dim, "font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "report"}):
        figure, axes = pyplot().subplots(4, 3, figsize=(12, 11), constrained_layout=True)
        for axis, (key, title, hint) in zip(axes.flat, PANELS):
            axis.set_title(f"{title}\n{hint}", loc="left", fontsize=8)
            axis.grid(alpha=0.3)
            for index, (_, _, rows) in enumerate(runs):
                if key == "eval/accuracy":  # the only metric that is not measured at every step
                    rows = [row for row in rows if row.get(key) is not None]
                x, y = column(rows, "step"), column(rows, key)
                axis.plot(x, y, color=COLOURS[index % 10], linewidth=1.2)
                if key == "eval/accuracy":
                    low, high = column(rows, "eval/low"), column(rows, "eval/high")
                    axis.fill_between(x, low, high, alpha=0.2, color=COLOURS[index % 10], linewidth=0)
            if key in ("eval/accuracy", "reward", "trained_rows"):
                axis.set_ylim(0, 1)
        draw_buffer(axes.flat[-1], runs[0][2])
        axes.flat[-1].legend(fontsize=6, ncols=2)
        content = picture(figure, "svg").decode()
    return content[content.index("<svg") :]


def runs_table(runs: Sequence[Run]) -> str:
    """One row a run: what it is, and its held-out accuracy at the start and at the end."""
    lines = ["<tr><th>run<th>algorithm<th>model<th>steps<th>held-out accuracy<th>questions</tr>"]
    for index, (name, config, rows) in enumerate(runs):
        measured = [row for row in rows if row.get("eval/accuracy") is not None]
        first, last = (
            measured[0]["eval/accuracy"],
            Interval(*(measured[-1][f"eval/{k}"] for k in ("accuracy", "low", "high"))),
        )
        cells = [
            config["algo"],
            config["model"],
            rows[-1]["step"],
            f"{first:.3f} → {last}",
            measured[-1]["eval/questions"],
        ]
        key = f'<i class="key" style="background:{COLOURS[index % 10]}"></i>'
        lines.append(f"<tr><td>{key} {escape(name)}" + "".join(f"<td>{escape(cell)}" for cell in cells) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


# ------------------------------------------------------------------------------------------------- samples


def group_samples(samples: Iterable[Row]) -> dict[tuple[int, str], list[Row]]:
    """(step, question id) → its logged trajectories, in the order in which they were written."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in samples:
        groups.setdefault((int(row["step"]), str(row["question"])), []).append(row)
    return groups


def token_spans(row: Row, scale: float) -> str:
    """The response, each token on a background as strong as its entropy; plain text where tokens are missing."""
    tokens, entropies = row.get("tokens") or [], row.get("token_entropies") or []
    if not tokens or len(tokens) != len(entropies):
        return escape(row["response"])
    spans = [
        f'<span class="token" style="--a:{0.75 * min(1.0, max(0.0, entropy) / scale):.2f}" '
        f'title="{entropy:.2f} nats">{escape(token) or "&#8709;"}</span>'
        for token, entropy in zip(tokens, entropies)
    ]
    if len(spans) > LONGEST:
        spans[LONGEST // 2 : -LONGEST // 2] = [f" … <i>{len(spans) - LONGEST} tokens left out</i> … "]
    return "".join(spans)


def trajectory_row(row: Row, scale: float, earlier: list[Row]) -> str:
    """One response. earlier: logged fresh successes of its question in earlier steps."""
    words = ['<b class="right">right</b>' if row["reward"] == 1 else '<b class="wrong">wrong</b>']
    if row["truncated"]:
        words.append('<b class="wrong">cut off</b>')
    words.append(f"<small>{row['entropy']:.3f} nats</small>")
    if row["replayed"]:
        born = next((e for e in earlier if e["response"] == row["response"]), None)
        told = (
            f"in step {born['step']:d}, entropy then {born['entropy']:.3f}" if born else "in a step that was not logged"
        )
        words.append(f'<b class="replayed">replayed</b><br><small>generated {told}</small>')
    return f'<div class="row"><div>{" ".join(words)}</div><div class="text">{token_spans(row, scale)}</div></div>'


def sample_section(samples: list[Row]) -> str:
    """Logged groups, spread over the run, each folded away under a line of its own."""
    groups = group_samples(samples)
    if not groups:
        return "<p>No samples were logged (--log-samples 0).</p>"
    entropies = sorted(float(entropy) for row in samples for entropy in row.get("token_entropies") or ())
    scale = max(0.5, entropies[int(0.98 * (len(entropies) - 1))]) if entropies else 1.0
    shown = list(groups)[:: math.ceil(len(groups) / GROUPS_SHOWN)]
    legend = "".join(f'<span class="token" style="--a:{0.75 * a / 4:.2f}">{a / 4 * scale:.2f}</span>' for a in range(5))
    parts = [
        f"<p>{len(shown)} of {len(groups)} logged groups. Each token's background is the entropy, in nats, of the "
        f'distribution that it was drawn from: <span class="text">{legend}</span>. A replayed row is from an earlier '
        f"step, and its entropy is under the policy that chose it.</p>"
        f'<input type="checkbox" id="only"> <label for="only">only groups with a replayed trajectory</label>'
    ]
    successes = [row for row in samples if row["reward"] == 1 and not row["replayed"]]
    for step, question in shown:
        rows = groups[step, question]
        earlier = [row for row in successes if row["question"] == question and row["step"] < step]
        right, replayed = sum(row["reward"] == 1 for row in rows), any(row["replayed"] for row in rows)
        parts.append(
            f'<details class="group{" with-replay" if replayed else ""}"><summary>step {step} · {escape(question)} · '
            f"{right} of {len(rows)} right{' · <b class=replayed>replayed</b>' if replayed else ''}</summary>"
            f'<p class="text">{escape(rows[0]["prompt"])}</p>'
            + "".join(trajectory_row(row, scale, earlier) for row in rows)
            + "</details>"
        )
    return "".join(parts)


# ---------------------------------------------------------------------------------------------------- page


def build_page(folders: Sequence[Path]) -> str:
    """The report of the first run, with the others' curves beside its own. Raises InputError."""
    runs = [read_run(folder) for folder in folders]
    name, config, _ = runs[0]
    path = folders[0] / "samples.jsonl"
    try:
        table, curves = runs_table(runs), draw_curves(runs)
        trajectories = sample_section(read_rows(path) if path.exists() else [])
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        files = f"metrics.jsonl or samples.jsonl of {', '.join(map(str, folders))}"
        raise InputError(f"a row of {files} is not as train.py writes it ({str(error)[:200]!r})") from None
    settings = "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in config.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,"><title>{escape(name)}</title><style>{STYLE}</style></head><body>
<h1>{escape(name)}</h1>{table}
<h2>Curves</h2>{curves}
<h2>Trajectories</h2>{trajectories}
<h2>Settings</h2><details><summary>config.json</summary><table>{settings}</table></details>
</body></html>
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("nano_exgrpo.evaluation.html_report", description="Write a run's report.html.")
    parser.add_argument("runs", nargs="+", type=Path, help="the run's folder; then others to compare its curves with")
    parser.add_argument("--out", type=Path, help="the file to write (default: report.html in the run's folder)")
    options = parser.parse_args(argv)
    target = options.out or options.runs[0] / "report.html"
    try:
        write_text(target, build_page(options.runs))
    except InputError as error:
        print(f"html_report: {error}", file=sys.stderr)
        return 2
    print(f"{target}: open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
