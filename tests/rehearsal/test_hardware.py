"""Hardware files: those that are shipped load, and what is wrong in one is said. Not covered: whether a datasheet is
right."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megarlhf.rehearsal.cost_model.hardware import Hardware, load_hardware
from tests.command import ROOT
from tests.refuses import refuses

SHIPPED = sorted((ROOT / "configs" / "hardware").glob("*.yaml"))


def figure(value: float) -> dict[str, object]:
    return {"value": value, "source": "by hand"}


def tree() -> dict[str, Any]:
    """A file in which every figure is easy to calculate with."""
    link = {"bandwidth": figure(1e9), "latency": figure(1e-5)}
    return {
        "name": "made up",
        "kind": "gpu",
        "memory": figure(1e9),
        "peaks": {"bfloat16": figure(1e12), "float32": figure(1e11)},
        "memory_bandwidth": figure(1e10),
        "launch": figure(1e-6),
        "efficiency": {
            "products": {"points": [{"flops": 1e6, "value": 0.25}, {"flops": 1e8, "value": 1.0}], "source": "by hand"},
            "attention": figure(0.5),
            "memory": figure(0.5),
        },
        "inside": link,
        "between": {"bandwidth": figure(1e8), "latency": figure(1e-4)},
        "host": link,
        "engine_step": figure(1e-3),
    }


def write(directory: Path, **changes: object) -> Path:
    path = directory / "machine.yaml"
    path.write_text(yaml.safe_dump({**tree(), **changes}))
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_load_and_every_figure_has_a_source(path):
    """Efficiencies are at most 1, bf16 is faster than fp32, and a node's own link is faster than the network."""
    hardware = load_hardware(path)
    assert hardware.kind == "gpu"
    assert hardware.peaks["bfloat16"].value > 4 * hardware.peaks["float32"].value
    assert hardware.inside.bandwidth.value > hardware.between.bandwidth.value
    assert hardware.inside.latency.value < hardware.between.latency.value
    assert len(hardware.sources) >= 15
    assert all(len(source) > 5 for source in hardware.sources.values())


def test_there_are_four_shipped_files():
    assert [path.stem for path in SHIPPED] == ["a100-80gb", "b200", "h100", "h200"]


def test_figures_of_the_h100_are_those_of_its_datasheet():
    """Dense, not with sparsity; NVLink in one direction (450e9), of which 80% are taken."""
    hardware = load_hardware(ROOT / "configs" / "hardware" / "h100.yaml")
    assert hardware.peaks["bfloat16"].value == 989.4e12
    assert hardware.memory_bandwidth.value == 3.35e12
    assert hardware.inside.bandwidth.value == 0.8 * 450e9


def test_a_file_of_ones_own(tmp_path):
    hardware = load_hardware(write(tmp_path))
    assert hardware == Hardware.model_validate(tree())
    assert hardware.sources["efficiency.products"] == "by hand"
    assert hardware.sources["peaks.bfloat16"] == "by hand"


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"memory_bandwith": figure(1e9)}, ("memory_bandwith", "memory_bandwidth")),
        ({"launch": {"value": 1e-6}}, ("missing key", "launch.source")),
        ({"launch": {"value": 1e-6, "source": ""}}, ("launch.source", "at least 1 character")),
        ({"peaks": {"bfloat16": figure(-1.0)}}, ("peaks.bfloat16.value", "greater than 0", "-1.0")),
        ({"peaks": {"bflot16": figure(1.0)}}, ("bflot16", "bfloat16")),
        ({"peaks": {}}, ("peaks", "at least 1 item")),
        ({"memory": figure(float("nan"))}, ("memory.value",)),
        ({"memory": figure(float("inf"))}, ("memory.value", "finite number")),
        ({"kind": "tpu"}, ("kind", "'gpu' or 'cpu'", "tpu")),
        ({"measured": {"source": "x", "products": [["float32", 1, 2, 2, 2, -1.0]]}}, ("measured.products.0.5",)),
        ({"measured": {"source": "x", "memory": [["coppy", "float32", 8, 1.0]]}}, ("coppy", "copy")),
        ({"efficiency": {**tree()["efficiency"], "memory": figure(1.5)}}, ("efficiency.memory.value", "equal to 1")),
        (
            {
                "efficiency": {
                    **tree()["efficiency"],
                    "products": {
                        "points": [{"flops": 1e8, "value": 1.0}, {"flops": 1e6, "value": 0.25}],
                        "source": "x",
                    },
                }
            },
            ("rising order", "sort"),
        ),
    ],
)
def test_a_mistake_is_refused_with_its_key(tmp_path, changes, names):
    with refuses(str(tmp_path / "machine.yaml"), *names):
        load_hardware(write(tmp_path, **changes))


def test_no_file_and_no_yaml(tmp_path):
    path = write(tmp_path)
    with refuses("machin.yaml", "machine.yaml"):
        load_hardware(path.with_name("machin.yaml"))
    path.write_text("name: [unclosed")
    with refuses("machine.yaml", "YAML"):
        load_hardware(path)
    path.write_text("- a list")
    with refuses("machine.yaml", "mapping"):
        load_hardware(path)
