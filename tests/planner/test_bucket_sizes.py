"""Sizes of ZeRO's messages: from latency, bandwidth, the model and the memory of a device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_trainer.planner.bucket_sizes import DEFAULT_BUCKET, SMALLEST_BUCKET, Network, prefetch_bucket, reduce_bucket
from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.cluster import COLLECTIVE, HOP, NETWORK_HOP, Cluster
from ds_trainer.planner.memory.estimate import estimate_memory
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.training.job_devices import cpu_cluster
from tests.planner.test_anchors import LLAMA_8B

NODE = Cluster.of("H100-80GB", 1, 8)
NETWORK = Network.of(NODE)
LATENCY = COLLECTIVE + 7 * HOP


def test_the_latency_is_a_twentieth_of_the_transfer() -> None:
    assert NETWORK is not None and (NETWORK.ranks, NETWORK.latency) == (8, LATENCY)
    transfer = NETWORK.message * 7 / 8 / (NETWORK.bandwidth * 1e9)
    assert pytest.approx(0.05 * transfer) == LATENCY
    found = reduce_bucket(4096, 2, 2, 8 * 10**9, NETWORK)
    assert found is not None and found.elements * 2 == pytest.approx(NETWORK.message, rel=1e-6)
    assert "19 us of latency are 5% of the transfer at 450 GB/s (8 x H100-80GB), 2 bytes each" in found.reason


def test_the_network_of_several_machines() -> None:
    found = Network.of(Cluster.of("A100", 2, 4))
    assert found is not None and found.bandwidth == 100 and found.latency == COLLECTIVE + 6 * HOP + NETWORK_HOP
    assert found.name == "8 x A100, 2 machines"
    alone = Network.of(Cluster.of("A100", 4, 1), 1)
    assert alone is not None and alone.bandwidth == 25
    assert Network.of(Cluster.of("H100", 1, 1)) is None and Network.of(NODE, 8) is None and Network.of(None) is None
    assert Network.of(cpu_cluster(1, 4, 16.0, 1)) is None


def test_more_ranks_need_larger_messages_until_the_memory_ends() -> None:
    networks = [Network.of(Cluster.of("H100", nodes, 8)) for nodes in (1, 2, 3, 8, 128, 512)]
    latencies = [network.latency for network in networks if network is not None]
    assert latencies == sorted(set(latencies)) and latencies[-1] > 200 * latencies[1]
    found = [reduce_bucket(8192, 2, 3, 70 * 10**9, network) for network in networks]
    sizes = [one.elements for one in found if one is not None]
    assert sizes[0] < sizes[1] < sizes[2] == sizes[3] == sizes[4] == sizes[5]
    assert found[-1] is not None and found[-1].reason == "0.5% of 84.9 GB"


@pytest.mark.parametrize(
    ("stage", "trainable", "board", "elements", "reason"),
    [
        (2, 3_000_001, {}, 3_000_002, "all 3000001 trained elements"),
        (2, 1000, {}, SMALLEST_BUCKET, "all 1000 trained elements"),
        (3, 400_000_000, {}, 50_000_000, "an eighth of 400000000 trained elements"),
        (3, 1_000_000_000, {"memory": 15.0}, 37_500_000, "0.5% of 15 GB"),
        (1, 1_000_000_000, {"memory": 15.0}, 75_000_000, "1.0% of 15 GB"),
        (1, 1_000_000_000, {"link": 10.0}, 4096**2, "hidden size squared, here"),
    ],
)
def test_limits(stage: int, trainable: int, board: dict[str, float], elements: int, reason: str) -> None:
    network = Network.of(replace(NODE, board=replace(NODE.board, **board)))
    width = 4096 if reason.startswith("hidden") else 256
    found = reduce_bucket(width, 2, stage, trainable, network, "here")
    assert found is not None and found.elements == elements and found.reason.startswith(reason)


def test_without_width_or_network() -> None:
    assert reduce_bucket(None, 4, 2) is None and prefetch_bucket(None, 4) is None
    known = reduce_bucket(None, 4, 2, 5_000_000)
    assert known is not None and known.elements == 5_000_000
    large = reduce_bucket(None, 4, 2, 10**10)
    assert large is not None and large.elements == DEFAULT_BUCKET
    small = reduce_bucket(None, 4, 2, 10**10, Network.of(replace(NODE, board=replace(NODE.board, link=1.0))))
    assert small is not None and small.elements == SMALLEST_BUCKET


def test_memory_has_the_buckets() -> None:
    model = PlannedModel.from_config(LLAMA_8B)
    run = Candidate(8, 2048, stage=3)
    with_network, without = (estimate_memory(model, run, cluster) for cluster in (NODE, None))
    bucket, prefetch = (
        reduce_bucket(4096, 2, 3, model.trainable, NETWORK),
        prefetch_bucket(4096, 2, model.total, NETWORK),
    )
    assert bucket is not None and prefetch is not None
    item = "reduction bucket"
    assert with_network.shared.states[item] == 2 * bucket.elements and without.shared.states[item] == 2 * 4096**2
    assert with_network.peak.total - without.peak.total >= 2 * (bucket.elements - 4096**2)
    assert with_network.tensors - without.tensors < 0.01 * 84.9e9
