"""What the exploration of csrc/share finds (test_explore.c, which test_c.py runs): each of these faults, in a
copy of the source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from builds import CC, FLAGS, KINDS, ROOT, run, succeed

KIND = "address,undefined"
MOST_RUNS = "6000"
# name, file of csrc/share, what stands there, what the fault puts there, the case that finds it and what that reports
FAULTS = [
    (
        "the generation of an answer is not checked",
        "receive.c",
        "if (!asked || slot->generation != message->generation) {",
        "if (!asked) {",
        "load, old answer",
        "a slot that another process still copies",
    ),
    (
        "a slot is free before its late answer",
        "receive.c",
        "  slot->state = KVS_SLOT_LATE;\n",
        "  slot->state = KVS_SLOT_FREE;\n",
        "load",
        "a slot that another process still copies",
    ),
    (
        "a piece is announced before its last copy has ended",
        "bring.c",
        "kvs_dev_event_query(device, bounce->end, &err)",
        "kvs_dev_event_query(device, bounce->crossed, &err)",
        "load",
        "a slot that another process still copies",
    ),
    (
        "the end of a socket counts as the end of the process",
        "share.c",
        "if (link->left || link->ended) kvs_receive_forget",
        "if (link->left || link->ended || link->socket < 0) kvs_receive_forget",
        "load, kill",
        "a slot that another process still copies",
    ),
    (
        "the thread looks at a process itself before it sleeps, and misses an end",
        "share.c",
        "(link->state == KVS_LINK_GONE && !link->left && !link->ended)",
        "(link->state == KVS_LINK_GONE && !link->left && !has_ended(link->process))",
        "load, kill",
        "nothing goes on, and a link has not ended",
    ),
    (
        "BYE is said before the pieces under way have ended",
        "share.c",
        "if (!link->said && !kvs_bring_works(share, link)) {",
        "if (!link->said) {",
        "load, lost link",
        "a slot that another process still copies",
    ),
    (
        "a store does not wait for a late writer",
        "receive.c",
        "  if (job->direction != KVS_D2H) return;\n  slot->job = job;",
        "  if (job) return;\n  slot->job = job;",
        "store",
        "a store has ended, and is still written",
    ),
    (
        "a dropped request is not answered",
        "bring.c",
        "    answer(share, link, request, KVS_CANCELLED);\n",
        "",
        "load",
        "a slot is not free at the end",
    ),
    (
        "a part of a shared store is reported before it is written",
        "receive.c",
        "if (job->told || job->left || ",
        "if (job->told || ",
        "shared store",
        "a block is wrong, and not reported",
    ),
    (
        "no limit ends the wait for a report",
        "receive.c",
        "if (job->told && job->told_ns + share->asked.store_ns < next)",
        "if (0 && job->told_ns + share->asked.store_ns < next)",
        "shared store that one does not call",
        "nothing goes on, and a job has not ended",
    ),
    (
        "a report names no block that does not fit",
        "receive.c",
        "if (job->failed[i] && part_of_block",
        "if (0 && part_of_block",
        "coded shared store",
        "a block that does not fit is not reported",
    ),
    (
        "a block that does not fit is passed on",
        "receive.c",
        "= is_good(share, job, own->pieces[piece]);",
        "= is_good(share, job, own->pieces[piece]) || 1;",
        "coded shared load",
        "a block that does not fit is not reported",
    ),
]


@pytest.fixture(scope="module")
def explorer(core: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The compiler's flags, the object of test_explore.c, and the core."""
    program = tmp_path_factory.mktemp("explore") / "explore.o"
    archive = core(KIND) / "libcore.a"
    succeed([*CC, *FLAGS, *KINDS[KIND], "-c", "tests/c/test_explore.c", "-o", str(program)])
    return [*FLAGS, *KINDS[KIND], str(program), str(archive), "-ldl", "-lm"]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "file", "before", "after", "case", "found"), FAULTS, ids=[row[0] for row in FAULTS])
def test_it_finds(
    explorer: list[str], tmp_path: Path, fault: str, file: str, before: str, after: str, case: str, found: str
) -> None:
    source = (ROOT / "csrc" / "share" / file).read_text()
    assert source.count(before) == 1, f"csrc/share/{file} has changed: say how '{fault}' looks there now"
    hurt, program = tmp_path / file, tmp_path / "explore"
    hurt.write_text(source.replace(before, after))
    succeed([*CC, str(hurt), *explorer, "-o", str(program)])  # its object comes before that in the archive
    done = run([str(program), case, MOST_RUNS])
    assert done.returncode == 1 and found in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
