# SPDX-License-Identifier: Apache-2.0
"""Checks what `lastgood bench` writes: bench_check.py JSON [SVG].

The figures are those of some machine and are not judged; that they follow from
each other is."""

import json
import math
import re
import statistics
import sys
import xml.etree.ElementTree as ET

NUMBER, TEXT, COUNT, FLAG = (int, float), str, int, bool
TOP = {"command": TEXT, "schema": COUNT, "version": TEXT, "created": TEXT, "machine": dict, "engine": dict,
       "bytes": COUNT, "tensors": COUNT, "ranks": COUNT, "rounds": COUNT, "threads": COUNT, "rows": list,
       "notes": list, "summary": TEXT, "advice": list}
MACHINE = {"cpu": TEXT, "cpus": COUNT, "memory_bytes": COUNT, "kernel": TEXT, "file_system": TEXT, "device": TEXT,
           "device_model": TEXT, "rotational": FLAG}
ENGINE = {"io": TEXT, "direct": TEXT, "io_uring": FLAG, "raw_direct": FLAG, "buffer_bytes": COUNT}
ROW = {"id": TEXT, "name": TEXT, "bytes": COUNT, "seconds": dict, "cpu_seconds": (int, float, type(None)),
       "bytes_per_second": NUMBER, "rounds": list, "limit": (str, type(None)), "ratio": (dict, type(None))}
ESTIMATE = {"median": NUMBER, "low": NUMBER, "high": NUMBER}
LIMITS = {"raw_write": None, "raw_read": None, "raw_read_16m": None, "raw_read_64k": None, "memcpy_n": None,
          "save": "raw_write", "load_cold": "raw_read", "load_warm": "memcpy_n", "tensor_16m": "raw_read_16m",
          "slice_64k": "raw_read_64k", "verify_n": "memcpy_n"}
OPTIONAL = {"memcpy_1": None, "verify_1": "memcpy_1", "async_save": "raw_write", "stall_eager": "memcpy_n",
            "stall_lazy": None, "fence": "memcpy_n"}


def members(what, value, expected):
    assert set(value) == set(expected), f"{what}: {sorted(set(value) ^ set(expected))}"
    for key, kind in expected.items():
        assert isinstance(value[key], kind), f"{what}.{key} is {value[key]!r}"
        assert kind is FLAG or not isinstance(value[key], bool), f"{what}.{key} is {value[key]!r}"


def close(a, b):
    return math.isclose(a, b, rel_tol=1e-9)


def check_estimate(what, estimate, values, extra=()):
    members(what, estimate, ESTIMATE | dict.fromkeys(extra, TEXT))
    assert close(estimate["median"], statistics.median(values)), what
    assert min(values) <= estimate["low"] * (1 + 1e-9) and estimate["high"] <= max(values) * (1 + 1e-9), what
    assert estimate["low"] <= estimate["median"] <= estimate["high"], what
    if len(values) < 6:
        assert close(estimate["low"], min(values)) and close(estimate["high"], max(values)), what


def verdict(ratio, rounds):
    narrow = ratio["high"] - ratio["low"] <= 0.2 * ratio["median"]
    if rounds < 6:
        return "not resolved"
    if ratio["low"] >= 0.85 or (narrow and ratio["median"] >= 0.85):
        return "near"
    return "below" if ratio["high"] < 0.85 or narrow else "not resolved"


def check_row(row, rows, rounds):
    name = row["id"]
    members(name, row, ROW)
    assert len(row["rounds"]) == rounds and all(s > 0 for s in row["rounds"]), name
    check_estimate(name, row["seconds"], row["rounds"])
    assert close(row["bytes_per_second"], row["bytes"] / row["seconds"]["median"]), name
    assert row["limit"] == (LIMITS | OPTIONAL)[name], name
    if row["limit"] is None:
        assert row["ratio"] is None, name
        return
    limit = rows[row["limit"]]
    ratios = [row["bytes"] / a / (limit["bytes"] / b) for a, b in zip(row["rounds"], limit["rounds"], strict=True)]
    check_estimate(f"{name}.ratio", row["ratio"], ratios, ["verdict"])
    assert row["ratio"]["verdict"] == verdict(row["ratio"], rounds), name


def check_json(document):
    members("document", document, TOP)
    members("machine", document["machine"], MACHINE)
    members("engine", document["engine"], ENGINE)
    assert document["command"] == "bench" and document["schema"] == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", document["created"])
    rows = {row["id"]: row for row in document["rows"]}
    assert len(rows) == len(document["rows"])
    assert set(LIMITS) <= set(rows) <= set(LIMITS | OPTIONAL), sorted(rows)
    for row in document["rows"]:
        check_row(row, rows, document["rounds"])
        if row["ratio"] is not None:
            assert row["name"] in document["summary"], row["name"]
    assert all(isinstance(s, str) and s for s in document["notes"] + document["advice"])
    assert rows["save"]["bytes"] == document["bytes"]


def check_svg(path, document):
    root = ET.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == space + "svg"
    width, height = float(root.get("width")), float(root.get("height"))
    assert root.get("viewBox") == f"0 0 {width:.0f} {height:.0f}"
    texts = [element.text for element in root.iter(space + "text")]
    for element in root.iter():
        for key in ("x", "x1", "x2"):
            assert 0 <= float((element.get(key) or "0").rstrip("%")) <= width, ET.tostring(element)
        for key in ("y", "y1", "y2"):
            assert 0 <= float((element.get(key) or "0").rstrip("%")) <= height, ET.tostring(element)
    bars = [e for e in root.iter(space + "rect") if e.get("class") in ("bar", "unsure")]
    full = {float(e.get("width")) for e in root.iter(space + "rect") if e.get("class") == "limit"}
    assert len(full) == 1
    compared = sorted((row for row in document["rows"] if row["ratio"]), key=lambda row: texts.index(row["name"]))
    assert len(bars) == len(compared)
    for bar, row in zip(bars, compared, strict=True):
        part = float(bar.get("width")) / max(full)
        assert abs(part - min(row["ratio"]["median"], 1.25)) < 0.002, row["id"]
        assert (bar.get("class") == "unsure") == (row["ratio"]["verdict"] == "not resolved"), row["id"]


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        document = json.load(file)
    check_json(document)
    print("the JSON is as documented")
    if len(sys.argv) > 2:
        check_svg(sys.argv[2], document)
        print("the picture is well-formed and shows the same figures")


main()
