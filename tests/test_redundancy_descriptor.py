"""The descriptor that lies beside a rank's file, where a rank runs, and the verb `plan`."""

from __future__ import annotations

import json

import pytest

from mpi_ckpt.cli import main
from mpi_ckpt.comm.topology import failure_domain
from mpi_ckpt.errors import InvalidManifest, UnknownSchema
from mpi_ckpt.redundancy import planner
from mpi_ckpt.redundancy.descriptor import Descriptor, Member, ParityPiece, read_descriptor, write_descriptor
from mpi_ckpt.redundancy.scheme import Scheme
from mpi_ckpt.redundancy.survey import survey
from mpi_ckpt.storage import manifest_json

SIZES = (100_000, 5, 90_000, 0)
MEMBERS = tuple(Member(r, f"node{r}", f"rank{r:05d}.h5", n, f"{r:064x}") for r, n in enumerate(SIZES))


def descriptor(scheme: str = "rs:2+2", member: int = 1) -> Descriptor:
    parsed = Scheme.parse(scheme)
    parts = planner.parity_parts(parsed, SIZES, member)
    parity = tuple(ParityPiece(p.offset, p.nbytes, "0123abcd") for p in parts)
    return Descriptor("0123456789abcdef", 4, parsed, member, MEMBERS, parity)


@pytest.mark.parametrize("scheme", ["partner", "xor", "rs:2+2", "rs:1+3"])
def test_what_was_written_is_read_back(tmp_path, scheme):
    written = descriptor(scheme)
    write_descriptor(tmp_path, written)
    assert read_descriptor(tmp_path / "rank00001.redundancy.json") == written
    assert survey(tmp_path, written.save_id).descriptors == (written,)
    assert survey(tmp_path, "f" * 16).descriptors == ()


def test_it_is_plain_json_with_a_line_a_member():
    text = descriptor().to_json()
    assert json.loads(text)["scheme"] == "rs:2+2"
    assert sum('"domain":"node' in line for line in text.splitlines()) == 4


def changed(**fields) -> str:
    document = manifest_json.load(descriptor().to_json())
    return manifest_json.dump({**document, **fields}, {})


MEMBER = MEMBERS[0]._asdict()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"scheme": "raid6"}, "scheme"),
        ({"save_id": "../x"}, "save_id"),
        ({"member": 4}, "member"),
        ({"member": True}, "member"),
        ({"world_size": 3}, "members"),
        ({"members": [MEMBER]}, "members"),
        ({"members": [MEMBER, MEMBER, MEMBER]}, "members"),
        ({"members": [{**MEMBER, "file": "../rank00000.h5"}]}, r"members\[0\].file"),
        ({"members": [{**MEMBER, "sha256": "x"}]}, r"members\[0\].sha256"),
        ({"parity": []}, "parity"),
        ({"format": "mpi_ckpt"}, "format"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_is_named(fields, said):
    with pytest.raises(InvalidManifest, match=rf"descriptor is not valid \(field {said}") as caught:
        Descriptor.from_json(changed(**fields), "some/path")
    assert caught.value.path == "some/path"


def test_a_newer_version_is_refused_by_name():
    with pytest.raises(UnknownSchema, match="schema_version 2"):
        Descriptor.from_json(changed(schema_version=2))


def test_every_changed_byte_is_noticed():
    text = descriptor().to_json()
    for at in range(0, len(text) - 1, 7):
        broken = text[:at] + ("7" if text[at] != "7" else "8") + text[at + 1 :]
        with pytest.raises(InvalidManifest):
            Descriptor.from_json(broken)


def test_a_damaged_descriptor_counts_as_lost_and_is_logged(tmp_path, caplog):
    write_descriptor(tmp_path, descriptor())
    path = tmp_path / "rank00001.redundancy.json"
    path.write_bytes(path.read_bytes()[:-40])
    assert survey(tmp_path, descriptor().save_id).descriptors == ()
    assert str(path) in caplog.text


def test_a_descriptor_under_another_file_s_name_is_refused(tmp_path):
    write_descriptor(tmp_path, descriptor())
    with pytest.raises(InvalidManifest, match="another file's name"):
        read_descriptor((tmp_path / "rank00001.redundancy.json").rename(tmp_path / "rank00002.redundancy.json"))


def test_a_directory_that_is_not_there_holds_nothing(tmp_path):
    assert survey(tmp_path / "gone", "0" * 16).files == {}


# -- where a rank runs -------------------------------------------------------------------------------------------------


def test_the_failure_domain_is_the_flag_or_the_variable_or_the_node():
    assert failure_domain(3, "rack 7", {"MPI_CKPT_DOMAIN": "b", "SLURMD_NODENAME": "c"}) == "rack 7"
    assert failure_domain(3, None, {"MPI_CKPT_DOMAIN": "b", "SLURMD_NODENAME": "c"}) == "b"
    assert failure_domain(3, None, {"MPI_CKPT_DOMAIN": "", "SLURMD_NODENAME": "c"}) == "c"
    assert failure_domain(3, None, {}) != ""


def test_a_rank_in_the_name_of_a_failure_domain_makes_a_node_of_each():
    assert failure_domain(3, "rack 7, {rank}", {}) == "rack 7, 3"
    assert failure_domain(12, None, {"MPI_CKPT_DOMAIN": "node{rank}"}) == "node12"


# -- plan --------------------------------------------------------------------------------------------------------------


def test_plan_prints_what_the_schemes_cost(capsys):
    assert main(["plan", "--ranks", "64", "--nodes", "16", "--bytes", "40GiB"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "640.0 MiB" in lines["single"]
    assert "no loss of a node" in lines["single"]
    assert "80.0 GiB" in lines["partner"]
    assert "14.3%" in lines["xor"]
    assert "any 1 node" in lines["xor"]
    assert "any 2 nodes" in lines["rs:4+2"]


def test_plan_speaks_json(capsys):
    assert main(["plan", "--ranks", "6", "--nodes", "6", "--bytes", "6000", "--scheme", "rs:4+2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "scheme": "rs:4+2",
            "group_sizes": [6],
            "bytes_a_rank": 1500,
            "bytes_in_total": 9000,
            "extra_bytes": 3000,
            "survives_nodes": 2,
            "error": None,
        }
    ]


@pytest.mark.parametrize(("nodes", "why"), [(1, "one failure domain"), (2, "too many of the ranks")])
def test_plan_says_that_a_launch_goes_on_unprotected_where_nothing_protects_it(capsys, nodes, why):
    flags = ["--ranks", "5", "--nodes", str(nodes), "--bytes", "1GB"]
    assert main(["plan", *flags, "--scheme", "single", "--scheme", "xor"]) == 1
    _, single, xor, *text = capsys.readouterr().out.splitlines()
    assert xor.split() == ["xor", *f"{single}: unprotected, see below".split()[1:]]
    assert why in "".join(text)
    assert "A launch goes on all the same" in "".join(text)
    assert main(["plan", *flags, "--scheme", "xor", "--json"]) == 1
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["bytes_in_total"], line["extra_bytes"], line["survives_nodes"]) == (10**9, 0, 0)
    assert why in line["error"]


@pytest.mark.parametrize("flags", [["--ranks", "4", "--nodes", "8"], ["--ranks", "8", "--nodes", "4", "--scheme", "x"]])
def test_plan_refuses_what_cannot_be(capsys, flags):
    assert main(["plan", *flags, "--bytes", "1GB"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
