# SPDX-License-Identifier: Apache-2.0
"""The page docs/benchmarks-peers.md, from the figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from adapters import PEERS
from measure import interval, median, spread

Rows = dict[str, list[Any]]

OURS = "lastgood"
DISK = "(disk, direct)"
KINDS = {k.name: k for k in PEERS}

INTRODUCTION = """# Benchmarks beside other tools

Made by `make bench-peers` (`bench/peers.py`), which anybody can run again. {machine}

- Each tool has a process of its own, forked from one that holds the state in touched memory, and warmed up by the same operation. In each of {rounds} rounds every tool does the operation once, one after the other, in an order drawn anew. Slow tools take part in the first rounds only; `n` says in how many.
- **Seconds** are the median, with first and third quartile. **CPU s** is processor time of the tool's process and those that it started: on a busy machine it says more than seconds do. **Memory** is the peak of resident memory during the operation beyond what there was before, mapped file pages and processes that it started included.
- **lastgood is faster by** is the median of the ratios of the two times of one round, with its 95 % interval (bootstrap). Above 1 lastgood is faster, below 1 the tool. *Not resolved*: the interval contains 1, so that this run does not say who is faster.
- lastgood checks the CRC32C of every block that it loads; a tool that checks what it loads is marked †. A save of lastgood ends with a commit: whatever happens before, the checkpoint before is untouched. No other tool here does either by default, and what is slower here pays for nothing else.
{states}
Versions: {versions}.
"""


def _machine(m: dict[str, Any]) -> str:
    load = f"{m['load_before']:.1f} before and {m.get('load_after', 0):.1f} after"
    return (
        f"{m['date']}: {m['cores']} cores of {m['cpu']} (a virtual machine), {m['memory_mib'] / 1024:.0f} GiB, "
        f"{m['file_system']} on a virtual disk, Linux {m['kernel']}, Python {m['python']}; load average {load}. "
        "The sections were measured one at a time; compare within a table only."
    )


def _present(samples: list[Any]) -> list[dict[str, float]]:
    return [s for s in samples if s is not None]


def _size(n: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}"
        n /= 1000
    return f"{n:.2f} GB"


def _seconds(x: float) -> str:
    return f"{x:.3f}" if x < 10 else f"{x:.1f}"


def ratio(ours: list[Any], theirs: list[Any], key: str) -> str:
    """Theirs by ours, of the rounds in which both took part."""
    values = [t[key] / o[key] for o, t in zip(ours, theirs, strict=True) if o and t and o[key] > 0]
    if not values:
        return ""
    low, high = interval(values)
    if len(values) < 3:
        return f"{median(values):.2f} (of {len(values)})"
    verdict = " *not resolved*" if low <= 1 <= high else ""
    return f"{median(values):.2f} ({low:.2f} to {high:.2f}){verdict}"


Column = tuple[str, Callable[[list[dict[str, float]]], str]]


def table(rows: Rows, columns: list[Column], key: str = "seconds", ours: str = OURS) -> list[str]:
    """One table: the fastest first, the limits last."""
    present = {name: _present(samples) for name, samples in rows.items()}
    order = sorted(
        (n for n in present if present[n]), key=lambda n: (n.startswith("("), median([s[key] for s in present[n]]))
    )
    out = [
        "| | " + " | ".join(c[0] for c in columns) + " | n | lastgood is faster by |",
        "| --- | " + "---: | " * len(columns) + "---: | ---: |",
    ]
    for name in order:
        cells = [c[1](present[name]) for c in columns]
        shown = f"**{name}**" if name.startswith(OURS) else name
        dagger = " †" if name in KINDS and KINDS[name].verifies and not name.startswith(OURS) else ""
        compared = "" if name == ours or ours not in rows else ratio(rows[ours], rows[name], key)
        out.append(f"| {shown}{dagger} | " + " | ".join(cells) + f" | {len(present[name])} | {compared} |")
    return [*out, ""]


def _timing(key: str = "seconds") -> Column:
    def cell(samples: list[dict[str, float]]) -> str:
        values = [s[key] for s in samples]
        low, high = spread(values)
        return f"{_seconds(median(values))} ({_seconds(low)} to {_seconds(high)})"

    return {"seconds": "seconds", "lost": "seconds lost", "stall": "stall, s"}.get(key, key), cell


def _speed(total: int) -> Column:
    return "GB/s", lambda samples: f"{total / median([s['seconds'] for s in samples]) / 1e9:.2f}"


CPU: Column = ("CPU s", lambda samples: _seconds(median([s["cpu"] for s in samples])))


def _memory(total: int) -> Column:
    def cell(samples: list[dict[str, float]]) -> str:
        most = median([s["memory"] for s in samples])
        return f"{_size(most)} ({most / total:.2f} ×)" if most > total / 100 else _size(most)

    return "memory", cell


def _disk(samples: list[dict[str, float]]) -> str:
    read = median([s["disk"] for s in samples])
    return f"{_size(read)} ({read / samples[0]['wanted']:.1f} ×)"


def _section(found: dict[str, Any], title: str, key: str) -> Rows | None:
    section = found["sections"].get(title)
    return None if section is None else section[key]


def _runs(found: dict[str, Any], title: str) -> list[tuple[str, str]]:
    """A section and its later runs, which are kept as "TITLE 2" and so on, and what is added to their headings."""
    words = {title: "", **{f"{title} {n}": f" (run {n})" for n in range(2, 10)}}
    return [(t, again) for t, again in words.items() if t in found["sections"]]


def _skipped(found: dict[str, Any], *titles: str) -> list[str]:
    out: dict[str, str] = {}
    for title in titles:
        out |= found["skipped"].get(title, {})
    return [f"Left out: {'; '.join(f'{name} ({why})' for name, why in sorted(out.items()))}.", ""] if out else []


def page(found: dict[str, Any]) -> str:
    """The whole page."""
    states = found["states"]
    words = []
    if "big" in states:
        s = states["big"]
        words.append(
            f"- State *big*: a model like GPT-2, bf16 weights, fp32 exp_avg and exp_avg_sq: {s['tensors']} tensors, {_size(s['bytes'])}."
        )
    if "small" in states:
        s = states["small"]
        words.append(f"- State *small*: {s['tensors']:,} tensors, {_size(s['bytes'])}.")
    versions = ", ".join(f"{n} {v}" for n, v in sorted(found["versions"].items()) if n != "-")
    out = [
        INTRODUCTION.format(
            machine=_machine(found["machine"]),
            rounds=found["rounds"],
            states="\n".join(words) + "\n",
            versions=versions,
        )
    ]
    big = states.get("big", {}).get("bytes", 1)
    for title, again in _runs(found, "save"):
        out += [
            f"## Saving, until durable{again}",
            "",
            "One process saves *big* to a new place. Time runs until the tool has returned and every file and folder, the folder above included, is synced; for tools that leave that to the caller the benchmark does it.",
            "",
            *table(found["sections"][title]["save"], [_timing(), _speed(big), CPU, _memory(big)]),
            *_skipped(found, title),
        ]
    for title, again in _runs(found, "load"):
        for key, heading, text in (
            ("cold", "## Loading, cold", "*big* into existing tensors, its files not in the page cache."),
            ("warm", "## Loading, warm", "The same with the files in the page cache."),
        ):
            rows = found["sections"][title][key]
            ours = {n: r for n, r in rows.items() if not (key == "cold" and n == "(memory, copied)")}
            out += [heading + again, "", text, "", *table(ours, [_timing(), _speed(big), CPU, _memory(big)])]
        if "orbax" in rows:
            out += ["orbax makes new arrays, which is not what the others do.", ""]
        out += _skipped(found, title)
    for threads, words_ in ((1, "one core"), (2, "two cores")):
        rows = _section(found, f"train {threads}", "train")
        if rows:
            reference = next(
                (n for n in ("lastgood async, lazy", "lastgood async", OURS) if n in rows and any(rows[n])), OURS
            )
            out += [
                f"## Training time lost, {words_} busy",
                "",
                f'{threads} thread{"s" * (threads > 1)} compute{"" if threads > 1 else "s"} steps of a fixed number of matrix products while *big* is saved in between. *Stall* is how long the trainer is stopped: the call, and the wait before the optimizer\'s update where the tool needs one. *Lost* is what the training takes longer than its steps take without a save, until the save is complete and synced. Tools without "async" in their name, torchsnapshot and orbax apart, save while the trainer waits. The ratios are of the time lost, against {reference}.',
                "",
                *table(
                    rows,
                    [
                        _timing("stall"),
                        _timing("lost"),
                        ("complete after, s", _timing()[1]),
                        ("step ×", lambda s: f"{median([x['slower'] for x in s]):.2f}"),
                        CPU,
                        _memory(big),
                    ],
                    "lost",
                    reference,
                ),
                *_skipped(found, f"train {threads}"),
            ]
    total = states.get("small", {}).get("bytes", 1)
    for title, again in _runs(found, "small"):
        for key, heading in (
            ("save", "## Many small tensors: saving"),
            ("cold", "## Many small tensors: loading, cold"),
        ):
            rows = found["sections"][title][key]
            out += [heading + again, "", "*small*, as above.", "", *table(rows, [_timing(), CPU, _memory(total)])]
        out += _skipped(found, title)
    for title, key, heading, text in (
        (
            "partial one",
            "one",
            "## One tensor of 16 MiB of it, cold",
            "The checkpoint is opened and one tensor of *big* is read into an existing one.",
        ),
        ("partial rows", "rows", "## 16 rows of it, cold", "As before, but 16 of its 4,096 rows: 64 KiB."),
    ):
        rows = _section(found, title, key)
        if rows:
            out += [
                heading,
                "",
                text,
                "",
                *table(rows, [_timing(), ("from disk (× wanted)", _disk), CPU]),
                *_skipped(found, title),
            ]
    out += _ranks(found)
    return "\n".join(out).rstrip() + "\n"


def _ranks(found: dict[str, Any]) -> list[str]:
    """The sections of several ranks."""
    total = found["states"].get("ranks", {}).get("bytes", 1)
    out: list[str] = []
    for title, key, heading in (
        ("ranks 4 save", "save", "## Four ranks save, until durable"),
        ("ranks 4 to 4", "cold", "## Four ranks load what four have saved, cold"),
        ("ranks 4 to 4", "warm", "## Four ranks load what four have saved, warm"),
        ("ranks 2 to 4", "cold", "## Four ranks load what two have saved, cold"),
        ("ranks 2 to 4", "warm", "## Four ranks load what two have saved, warm"),
        ("ranks 4 to 2", "cold", "## Two ranks load what four have saved, cold"),
        ("ranks 4 to 2", "warm", "## Two ranks load what four have saved, warm"),
    ):
        rows = _section(found, title, key)
        if rows:
            if not out:
                out += [
                    f"*Several ranks* below are processes on this machine, over gloo, each with a quarter (or half) of the rows of every tensor of *big* ({_size(total)} in all), as FSDP2 has them. All begin together; seconds are those of the slowest rank, CPU s those of all, memory that of the rank that takes most. {DISK} moves as many bytes by as many processes, each in a file of its own.",
                    "",
                ]
            out += [heading, "", *table(rows, [_timing(), _speed(total), CPU, _memory(total)])]
    return out


def write_page(found: dict[str, Any], path: Path | None) -> None:
    """To a file, or to the screen."""
    text = page(found)
    if path is None:
        print(text)
    else:
        path.write_text(text, encoding="utf-8")
