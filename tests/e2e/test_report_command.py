"""`edgebuild report`: the page drawn again, from the artifact and what was measured since."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import run
from edgebuild.tune.records import Trial
from edgert.integrity import sha256_file
from edgert.manifest import load_manifest
from report_toys import DOCTOR, acceptance, trial


def logbook(path: Path, artifact: Path, *, sha256: str | None = None) -> Path:
    """Two trials of this artifact."""
    manifest = load_manifest(artifact)
    own = {
        "sha256": sha256 or sha256_file(artifact / "manifest.json"),
        "model_identity": manifest.model.identity,
        "name": manifest.name,
    }
    changed = {"changed": "enable_chunked_prefill", "before": False, "after": True}
    lines: list[Trial] = [trial(1, "baseline", 10.0), trial(2, "chunked_prefill", 12.0, **changed)]
    documents = [{**line.model_dump(mode="json"), "acceptance": {"code": acceptance(0.5)}} for line in lines]
    for document in documents:
        document["artifact"] = {**document["artifact"], **own}
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_a_built_report_says_what_was_not_measured_and_keeps_what_was(llama_artifact: Path) -> None:
    text = (llama_artifact / "report.html").read_text()
    facts = json.loads((llama_artifact / "build.json").read_text())
    assert facts["golden"]["worst_error"] < facts["golden"]["tolerance"]
    assert f"worst relative error {facts['golden']['worst_error']:.1e}" in text
    assert facts["memory"]["KV cache"] > 0
    assert {state["status"] for state in facts["cells"]} == {"direct"}
    assert "not measured here" in text
    assert "edgebuild tune ARTIFACT" in text


def test_the_page_is_drawn_again_with_a_doctors_report_a_benchmark_and_a_logbook(
    llama_artifact: Path, workshop: Path, tmp_path: Path
) -> None:
    """As a user does it: the commands that the page itself names."""
    doctor, bench = tmp_path / "doctor.json", tmp_path / "morning.json"
    doctor.write_text(run(["edgert", "doctor", llama_artifact, "--json"]).out)
    ran = run(["edgert", "bench", llama_artifact, "--traffic", workshop / "trace.csv", "--requests", "3", "--json"])
    bench.write_text(ran.out)
    tuning = logbook(tmp_path / "tuning.jsonl", llama_artifact)
    before = sha256_file(llama_artifact / "report.html")
    options = ["--doctor", doctor, "--bench", bench, "--tuning", tuning, "--output", tmp_path / "page.html"]
    ran = run(["edgebuild", "report", llama_artifact, *options])
    assert ran.code == 0, ran.err
    text = (tmp_path / "page.html").read_text()
    assert "prefill-" in text
    assert "in use, by phase" in text
    assert "morning" in text
    assert "+ chunked prefill" in text
    assert text.count("not measured here") < (llama_artifact / "report.html").read_text().count("not measured here")
    assert sha256_file(llama_artifact / "report.html") == before
    again = run(["edgebuild", "report", llama_artifact, *options[:-1], tmp_path / "again.html"])
    assert again.code == 0
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "page.html").read_bytes()


def test_the_page_lands_beside_the_artifact_and_never_inside(llama_artifact: Path) -> None:
    ran = run(["edgebuild", "report", llama_artifact])
    target = llama_artifact.with_name(f"{llama_artifact.name}.report.html")
    assert ran.code == 0, ran.err
    assert target.exists()
    target.unlink()
    ran = run(["edgebuild", "report", llama_artifact, "--output", llama_artifact / "new.html"])
    assert ran.code == 9
    assert "inside the artifact" in ran.error_line
    assert run(["edgebuild", "verify", llama_artifact, "--no-golden"]).code == 0


def test_measurements_of_something_else_are_refused_by_name(llama_artifact: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(DOCTOR))
    ran = run(["edgebuild", "report", llama_artifact, "--doctor", other])
    assert ran.code == 12
    assert "run edgert doctor on this artifact" in ran.error_line
    tuning = tmp_path / "theirs.jsonl"
    tuning.write_text(trial(1, "baseline", 10.0).model_dump_json() + "\n")
    ran = run(["edgebuild", "report", llama_artifact, "--tuning", tuning])
    assert (ran.code, "no trial of this model" in ran.error_line) == (12, True)
    for content, said in (("{}", "not a report of edgert bench"), ("[1]", "expected a JSON object"), ("x", "not JSON")):
        other.write_text(content)
        ran = run(["edgebuild", "report", llama_artifact, "--bench", other])
        assert (ran.code, said in ran.error_line) == (12, True)


def test_a_logbook_of_another_build_of_the_model_is_drawn_and_said(llama_artifact: Path, tmp_path: Path) -> None:
    tuning = logbook(tmp_path / "tuning.jsonl", llama_artifact, sha256="9" * 64)
    page = tmp_path / "page.html"
    ran = run(["edgebuild", "report", llama_artifact, "--tuning", tuning, "--output", page])
    assert ran.code == 0, ran.err
    assert "The tuning log is of another build of the same model." in page.read_text()
