"""Which tests run with ``-m matrix`` only, besides those that are marked so; and which files take longest."""

from __future__ import annotations

MATRIX = {
    # Scripts of benchmarks, run small: what they compare is compared by tests of its own.
    "tests/benchmarks/test_soak.py::test_only_deliberate_leaks_grow": (
        "tests/training/test_layout_memory.py, tests/checkpoint/shards/test_opened_files.py: "
        "memory and open files of a run"
    ),
    "tests/benchmarks/test_checkpoint_formats.py::test_both_formats_are_exact_and_one_writes_less": (
        "tests/checkpoint/shards/test_layouts.py, tests/checkpoint/weights/test_model_files.py: both ways are exact"
    ),
    "tests/benchmarks/test_parallel.py::test_the_script_trains_every_layout_to_the_same_losses": (
        "tests/training/test_layouts.py: every layout trains to the losses of one process"
    ),
    "tests/benchmarks/test_overhead.py::test_the_script_runs_the_loops_on_two_ranks_and_they_do_the_same_work": (
        "tests/parity/test_two_ranks.py: both loops do the same work"
    ),
    "tests/benchmarks/test_loading_memory.py": (
        "tests/engine/loading/test_creation_memory.py: a load takes no memory beside the shards"
    ),
    "tests/benchmarks/test_loading_scale.py": (
        "tests/checkpoint/loading/test_verification_cost.py: how many reads a load makes, and of how many bytes"
    ),
    "tests/benchmarks/test_gpu_kit.py::test_every_stage_runs_on_the_cpu": (
        "the other tests of tests/benchmarks/test_gpu_kit.py; what its oracle compares: tests/training/test_layouts.py"
    ),
    "tests/checkpoint/loading/test_verification_cost.py::test_verifying_8b_takes_thousands_of_small_reads[64]": (
        "the same test with one rank, and tests/checkpoint/loading/test_range_reader.py"
    ),
    # Grids in which a part has every kind of fault.
    "tests/training/test_mixed_batches.py::"
    "test_at_stage_3_different_modules_end_all_ranks_and_are_named[not in one of the second epoch-4-100000]": (
        "the same test at this step with parameters that are gathered, and at the first step with both thresholds"
    ),
    **{
        f"tests/utils/test_failures.py::test_ranks_without_a_launcher_end[{where}-0]": (
            "the same test at ZeRO 3, and at ZeRO 0 with a failing loss"
        )
        for where in ("dataset", "callback")
    },
    **{
        f"tests/training/test_layouts.py::{name}[{case}]": (
            "the same test on four ranks under every axis; all axes at once: test_trajectory_is_that_of_one_process"
        )
        for name, case in (
            ("test_recomputation", "False-all3"),
            ("test_recomputation", "True-all3"),
            ("test_optimizer_offload", "all3"),
            ("test_bf16", "all3"),
        )
    },
    "tests/cluster/test_doctor.py::test_the_doctor_checks_both_machines[False]": (
        "the same test with two machines that differ; two that do not: tests/monitor/doctor/test_ranks.py"
    ),
    "tests/resilience/test_restarts.py::test_killed_ranks_are_restarted[False]": (
        "the same test with saves in the background, and tests/checkpoint/protocol/test_crashes.py for all others"
    ),
    **{
        f"tests/engine/test_launchers.py::test_two_ranks_train_like_one[{launcher}]": (
            "the same test under torchrun and alone; for this launcher tests/cluster/test_launchers.py"
        )
        for launcher in ("deepspeed", "openmpi", "mpich", "srun")
    },
    "tests/cluster/test_launchers.py::test_a_killed_rank_ends_the_job_with_its_exit_code[srun]": (
        "the same test with pdsh; exit codes of ranks under srun: tests/cluster/test_ends.py"
    ),
    **{
        f"tests/cluster/test_launchers.py::test_scripts_started_by_hand_with_mpi[{way}]": (
            "the same test by the other way of each MPI"
        )
        for way in ("hydra, in an allocation", "Open MPI, ssh")
    },
    **{
        f"tests/utils/test_failures.py::test_a_launched_job_ends[{case}]": (
            "the same test under torchrun and ds-trainer launch, with a failing loss and a failing dataset; "
            "failing callbacks: the other tests of the file"
        )
        for case in ("deepspeed-dataset-0-1", "deepspeed-loss-3-1", "deepspeed-callback-3-1", "torchrun-callback-0-0")
    },
    **{
        f"tests/training/test_exact_resume.py::test_a_resumed_run_is_bit_identical[{name}]": (
            "the same test with augmented data in workers, and with a stateful stream in workers"
        )
        for name in ("workers", "persistent workers", "stream, workers")
    },
    **{
        f"tests/cluster/test_launchers.py::test_four_ranks_connect_and_get_their_arguments[{launcher}]": (
            "the same test with pdsh and srun; torchrun on two machines: tests/cluster/test_scripts.py; "
            "the commands of the others: tests/launching/test_commands.py"
        )
        for launcher in ("torchrun", "openmpi", "slurm")
    },
    "tests/cluster/test_launchers.py::test_remote_ranks_end_when_the_launcher_is_killed"
    "[ds_trainer launch|deepspeed.launcher.runner]": "the same test with pdsh",
    "tests/cluster/test_launchers.py::test_the_command_for_many_machines_can_be_pasted": (
        "tests/launching/test_commands.py, and the same command started by ds-trainer in this file"
    ),
    **{
        f"tests/parity/test_evaluation.py::test_evaluation_is_the_same_under_every_layout[{kind}]": (
            "the same test with a causal LM and an encoder-decoder; this kind: test_predict_as_transformers"
        )
        for kind in ("many outputs", "token classifier", "sequence classifier")
    },
}
"""Beginning of a test's name -> the tests of the default run that notice the same mistakes."""

# Files that several processes begin with, so that none of them is left alone with one at the end.
LONG = ("tests/cluster/", "tests/resilience/", "tests/examples/", "tests/benchmarks/", "tests/engine/test_launchers.py")
