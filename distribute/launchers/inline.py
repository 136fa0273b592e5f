"""A world of one: the function runs right here, with no process and no process group."""

from __future__ import annotations

from distribute import ambient, devices, display, outcome
from distribute.context import Context
from distribute.deadline import bounded
from distribute.failure import carry
from distribute.interrupt import from_handler
from distribute.outcome import Outcome
from distribute.plan import Plan
from distribute.task import Task
from distribute.worker import run_user
from distribute.world import World


def run(plan: Plan, task: Task) -> list[Outcome]:
    """Runs a task in the calling process."""
    streams = ambient.Streams.capture()
    index = None if plan.accelerator in ("cpu", "mps") else plan.devices[0]
    world = World(
        rank=0,
        local_rank=0,
        node_rank=0,
        world_size=1,
        local_world_size=1,
        num_nodes=1,
        device=devices.device(plan.accelerator, index),
        backend=plan.backend,
        seed=streams.seed() if plan.seed is None else plan.seed,
        grouped=False,
    )
    if plan.seed is not None:
        ambient.seed_all(plan.seed)
    try:
        context = Context(world, display.here())
        value = bounded(
            plan.deadline,
            plan.grace,
            lambda: run_user(context, task, write_back=plan.write_back),
        )
    except SystemExit as error:
        if from_handler(error):
            raise  # the user's handler of a signal ends the program
        # As a rank of a larger world: the call returns None, or a failure is told.
        ended = outcome.system_exit(0, error, local=True)
        if not ended.failed:
            return [ended]
        told = ended.error()
        carry(told, (outcome.public(ended),))
        raise told from None
    except BaseException as error:
        carry(error, (outcome.public(outcome.raised(0, error, local=True)),))
        raise
    finally:
        if plan.seed is not None:
            streams.restore()
    return [outcome.returned(0, value, local=True)]
