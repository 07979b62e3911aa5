"""`plan --json` is written a part at a time and is one document all the same."""

import json

import pytest
from click.testing import CliRunner

from mxfp4.cli import render
from mxfp4.cli.main import main
from mxfp4.cli.plan import plan_json
from mxfp4.converters.convert import plan_conversion


@pytest.mark.parametrize("at_a_time", [1, 7, 4096])
@pytest.mark.parametrize("sizes", [[], [1, 2]])
def test_equals_the_document_as_a_whole(moe_folder, monkeypatch, at_a_time, sizes):
    monkeypatch.setattr(render, "_ROWS_AT_A_TIME", at_a_time)
    flags = ["--tp", ",".join(map(str, sizes))] if sizes else []
    done = CliRunner().invoke(main, ["plan", str(moe_folder), "--json", *flags])
    wanted = plan_json(plan_conversion(moe_folder), sizes)
    assert ("tensor_parallel" in wanted) == bool(sizes)
    assert len(wanted["tensors"]) > 7
    assert done.stdout == json.dumps(wanted, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("count", range(5))
def test_any_number_of_rows(capsys, monkeypatch, count):
    monkeypatch.setattr(render, "_ROWS_AT_A_TIME", 2)
    rows = [{"name": f'"{number}"\\ä', "shape": [number]} for number in range(count)]
    encoded = [json.dumps(row, ensure_ascii=False) for row in rows]
    render.emit_object({"a": 1}, "rows", encoded, {"z": 2})
    assert json.loads(capsys.readouterr().out) == {"a": 1, "rows": rows, "z": 2}
