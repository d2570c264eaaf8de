"""The manager's command line: FastDeploy's two generations of it, what is refused, and what is kvswap's own."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import argparse
import os
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import run_python

pytest.importorskip("msgspec")

import kvswap
from kvswap import cli
from kvswap.fastdeploy.manager import arguments, caches, places
from kvswap.fastdeploy.manager.arguments import Settings

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")


def parse(*words: str) -> Settings:
    parser = argparse.ArgumentParser()
    arguments.add_run(parser)
    return arguments.settings_of(parser.parse_args(words))


SEED = (
    "--rank", "1", "--device_id", "3", "--num_layers", "2", "--head_dim", "128", "--kv_num_head", "8",
    "--rdma_port", "", "--mp_num", "2", "--protocol", "ipc", "--enable_splitwise", "0", "--cache_queue_port", "9911",
    "--pod_ip", "0.0.0.0", "--engine_worker_queue_port", "9912", "--engine_pid", "77", "--num_gpu_blocks", "100",
    "--num_cpu_blocks", "200", "--block_size", "64", "--bytes_per_layer_per_block", "131072", "--cache_dtype",
    "bfloat16", "--speculative_config", "{}", "--local_data_parallel_id", "1", "--create_cache_tensor",
    "--splitwise_role", "mixed",
)  # fmt: skip
NEWER = (
    "--splitwise_role", "mixed", "--rank", "0", "--device_id", "0", "--max_model_len", "32768", "--num_layers", "3",
    "--mp_num", "1", "--cache_dtype", "block_wise_fp8", "--default_dtype", "float16", "--key_cache_shape",
    "100,4,64,128", "--value_cache_shape", "100,4,64,64", "--cache_queue_port", "9923", "--enable_splitwise", "0",
    "--pod_ip", "0.0.0.0", "--engine_worker_queue_port", "9923", "--num_cpu_blocks", "4", "--ipc_suffix", "abc",
    "--protocol", "ipc", "--local_data_parallel_id", "0", "--rdma_port", "", "--speculative_config",
    '{"method": "mtp", "num_extra_cache_layer": 1, "num_gpu_block_expand_ratio": 1}', "--write_policy",
    "write_through", "--model_path", "/models/x", "--routing_replay_config", '{"enable_routing_replay": false}',
)  # fmt: skip


def test_the_seeds_line() -> None:
    settings = parse(*SEED)
    layout = settings.layout
    assert (layout.rank, layout.device_id, settings.ranks, settings.create) == (1, 3, 2, True)
    assert layout.key_shape == layout.value_shape == (100, 8, 64, 128) and layout.num_cpu_blocks == 200
    caches = layout.caches()
    assert [cache.name for cache in caches] == [
        f"{kind}_caches_{layer}_rank1.device3" for layer in (0, 1) for kind in ("key", "value")
    ]
    assert {cache.block_nbytes for cache in caches} == {131072} and layout.slot_nbytes == 4 * 131072
    assert settings.directory.name == "manager-9911.1"


def test_the_newer_line() -> None:
    """Keys, scales of keys, values, scales of values, layer by layer; then the extra layer's."""
    layout = parse(*NEWER).layout
    caches = layout.caches()
    assert [cache.name.rpartition("_rank")[0] for cache in caches[:4]] == [
        "key_caches_0", "key_cache_scales_0", "value_caches_0", "value_cache_scales_0",
    ]  # fmt: skip
    assert len(caches) == 4 * 4 and caches[-1].name == "value_cache_scales_3_rank0.device0"
    assert [cache.shape for cache in caches[:4]] == [(100, 4, 64, 128), (100, 4, 64), (100, 4, 64, 64), (100, 4, 64)]
    assert [cache.block_nbytes for cache in caches[:4]] == [32768, 512, 16384, 512]


def test_a_host_block_is_one_run_of_all_layers(device: kvswap.Device) -> None:
    """Keys, values, their scales and the extra layer, one behind the other; blocks in any order are a run each."""
    layout = parse(*NEWER).layout
    host = caches.HostSide(device, layout)
    for here, after in pairwise(host.pools):
        assert after.ptr == here.ptr + here.block_nbytes
    first, last = host.pools[0], host.pools[-1]
    assert {pool.stride for pool in host.pools} == {layout.slot_nbytes}
    assert last.ptr + last.block_nbytes - first.ptr == layout.slot_nbytes == 4 * (32768 + 512 + 16384 + 512)
    del here, after, first, last
    host.close()


def test_keys_only() -> None:
    layout = parse("--key_cache_shape", "10,1,64,576", "--value_cache_shape", "", "--num_layers", "2").layout
    assert [cache.name for cache in layout.caches()] == ["key_caches_0_rank0.device0", "key_caches_1_rank0.device0"]


def test_extra_layers_with_fewer_blocks() -> None:
    config = '{"num_extra_cache_layer": 2, "num_gpu_block_expand_ratio": 0.5}'
    layout = parse("--num_gpu_blocks", "11", "--speculative_config", config).layout
    assert [cache.num_blocks for cache in layout.caches()] == [11, 11, 5, 5, 5, 5]
    assert layout.num_gpu_blocks == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--enable_splitwise", "1"), "--enable_splitwise 1: splitting prefill"),
        (("--splitwise_role", "prefill"), "--splitwise_role prefill"),
        (("--protocol", "rdma"), "--protocol rdma: caches are shared on one machine"),
        (("--kvcache_storage_backend", "mooncake"), "--kvcache_storage_backend mooncake: there is no storage"),
        (("--rank", "2", "--mp_num", "2"), "ranks go from 0 to mp_num - 1"),
        (("--mp_num", "65"), "64 at most"),
        (("--slab",), "--slab goes with --create_cache_tensor"),
        (("--value_cache_shape", "1,1,1,1"), "goes with --key_cache_shape"),
        (("--key_cache_shape", "2,1,1,1", "--value_cache_shape", "3,1,1,1"), "has 3 blocks, --key_cache_shape 2"),
        (("--bytes_per_layer_per_block", "127", "--head_dim", "1"), "a block of the given shape has 128 bytes"),
        (("--routing_replay_config", '{"enable_routing_replay": true}'), "enable_routing_replay is on"),
    ],
)
def test_what_is_not_served_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(*words)
    assert cli.main(["manager", "run", *words]) == cli.EXIT_USAGE


@pytest.mark.parametrize(
    "words",
    [
        ("--rank", "-1"), ("--num_layers", "0"), ("--key_cache_shape", "1,2,3"), ("--key_cache_shape", "1,2,3,x"),
        ("--key_cache_shape", "1,2,3,0"), ("--cache_dtype", "int4"), ("--speculative_config", "{"),
        ("--speculative_config", "[]"), ("--task_timeout", "0"), ("--task_timeout", "nan"), ("--queue_limit", "0"),
        ("--speculative_config", '{"num_extra_cache_layer": -1}'),
        ("--speculative_config", '{"num_extra_cache_layer": true}'),
        ("--speculative_config", '{"num_extra_cache_layer": 1, "num_gpu_block_expand_ratio": "x"}'),
        ("--no_such_option",), ("--routing_replay_config", "x"), ("--cache_queue_port", "99999999"),
        ("--cache_queue_port", "-1"), ("--cache_queue_port", "x"), ("--metrics_port", "0"), ("--metrics_port", "65536"),
    ],
)  # fmt: skip
def test_wrong_values(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*words)
    assert ended.value.code == 2 and words[0] in capsys.readouterr().err


def test_every_option_has_a_help_text() -> None:
    parser = argparse.ArgumentParser()
    arguments.add_run(parser)
    silent = [action.dest for action in parser._actions if not action.help]
    assert silent == []


def test_kernels_are_left_out_unless_mps_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the device is opened; what the user disabled stays disabled."""
    monkeypatch.setenv("KVSWAP_DISABLE", "batch,kernel")
    arguments.disable_kernels()
    assert os.environ["KVSWAP_DISABLE"] == "batch,kernel,burst"
    monkeypatch.delenv("KVSWAP_DISABLE")
    arguments.disable_kernels()
    assert os.environ["KVSWAP_DISABLE"] == "kernel,burst"
    kvswap.Device("host:0")  # these are names that it knows


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert places.default_directory(7, 2) == tmp_path / "kvswap" / "manager-7.2"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert places.default_directory(7).parent == Path(f"/tmp/kvswap-{os.getuid()}")
    for port in (-1, 65536):
        with pytest.raises(ValueError, match=f"port is {port}: must be from 0 to 65535"):
            places.default_directory(port)
    with pytest.raises(TypeError, match="port must be an int, not str"):
        places.default_directory("x")
    assert parse("--socket_dir", "here").directory == Path.cwd() / "here"
    folder = tmp_path / "a" / "b"
    places.prepare_directory(folder)
    assert [each.stat().st_mode & 0o777 for each in (folder.parent, folder)] == [0o700, 0o700]
    places.prepare_directory(folder)
    folder.chmod(0o770)
    with pytest.raises(kvswap.Error, match="mode 770"):
        places.prepare_directory(folder)
    with pytest.raises(kvswap.Error, match="too long"):
        places.socket_path(tmp_path / ("x" * 120))


def test_without_the_packages_it_says_which() -> None:
    result = run_python(
        """
        import sys
        sys.modules["zmq"] = None
        from kvswap import cli
        assert cli.main(["info"]) == 0
        sys.exit(cli.main(["manager", "status"]))
        """
    )
    assert result.returncode == 2 and "pip install 'kvswap[manager]'" in result.stderr


def test_exit_status_of_a_manager_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zmq")
    words: list[Any] = ["manager", "status", "--socket_dir", str(tmp_path / "none")]
    assert cli.main(words) == cli.EXIT_DEVICE
    assert "no manager was started" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "drain"])
def test_a_manager_that_was_stopped_is_not_waited_for(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder and lock stay; after kill -9 its socket stays too."""
    pytest.importorskip("zmq")
    folder = tmp_path / "manager"
    places.prepare_directory(folder)
    places.Lock(folder, 0).close()
    words = ["manager", command, "--socket_dir", str(folder), "--timeout", "0.2"]
    assert cli.main(words) == cli.EXIT_DEVICE
    assert "no manager runs there" in capsys.readouterr().err
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(places.socket_path(folder)))
        assert cli.main(words) == cli.EXIT_DEVICE
        assert "no manager runs there" in capsys.readouterr().err
        left.listen(0)
        for _ in range(3):  # the backlog is full from the second on: it listens, though it accepts none
            places.check_running(folder)
