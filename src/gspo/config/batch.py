"""The arithmetic of a batch: how many sequences, updates and micro-batches a step has, or why it cannot be cut."""

from __future__ import annotations

from dataclasses import dataclass

from gspo.errors import ConfigError

#: Prompts of a generated task when ``data.num_prompts`` is not set.
DEFAULT_TASK_PROMPTS = 1000


@dataclass(frozen=True)
class BatchPlan:
    """What one step comes to. P prompts, G responses each, N = P * G sequences, M updates, W ranks."""

    num_sequences: int  # N
    sequences_per_update: tuple[int, ...]  # M sizes that differ by at most 1 and add up to N
    num_micro_batches: int | None  # per rank, of the largest update; None: cut by tokens, not by count
    steps_per_epoch: int | None  # whole steps that the prompts last for; None: number of prompts not known
    leftover_prompts: int | None  # prompts of an epoch that do not fill a step
    notes: tuple[str, ...]  # sentences for the start-up summary


def plan_batch(
    prompts_per_step: int,
    group_size: int,
    num_mini_batches: int = 1,
    world_size: int = 1,
    micro_batch_size: int | None = None,
    num_prompts: int | None = None,
) -> BatchPlan:
    """Solves the batch arithmetic.

    Args:
        prompts_per_step: P, prompts of one rollout batch.
        group_size: G, responses per prompt.
        num_mini_batches: M, updates that the N = P * G sequences are cut into; sizes differ by at most 1.
        world_size: W, ranks that share each update equally.
        micro_batch_size: m, sequences per rank and forward; None where they are cut by tokens.
        num_prompts: prompts of the data set, if known.

    Raises:
        ConfigError: a group of one, more updates than sequences, an update that W ranks cannot share equally, or
            fewer prompts than a step needs. The message names values that work.
    """
    _check_counts(prompts_per_step, group_size, num_mini_batches, world_size, micro_batch_size)
    total = prompts_per_step * group_size
    small, larger = divmod(total, num_mini_batches)
    sizes = (small + 1,) * larger + (small,) * (num_mini_batches - larger)
    if any(size % world_size for size in sizes):
        raise ConfigError(_unshareable(prompts_per_step, group_size, num_mini_batches, world_size))
    per_rank = sizes[0] // world_size
    count = None if micro_batch_size is None else -(-per_rank // micro_batch_size)
    epoch = None if num_prompts is None else divmod(num_prompts, prompts_per_step)
    if epoch is not None and epoch[0] == 0:
        raise ConfigError(
            f"data.num_prompts = {num_prompts} is fewer than rollout.prompts_per_step = {prompts_per_step}, so a step "
            f"would hold a prompt twice; take at most {num_prompts} prompts per step, or more prompts"
        )
    notes = [
        *_cut_notes(sizes, group_size),
        *_micro_notes(per_rank, group_size, micro_batch_size),
        *_epoch_notes(num_prompts, epoch),
    ]
    return BatchPlan(
        num_sequences=total,
        sequences_per_update=sizes,
        num_micro_batches=count,
        steps_per_epoch=None if epoch is None else epoch[0],
        leftover_prompts=None if epoch is None else epoch[1],
        notes=tuple(notes),
    )


def _check_counts(prompts: int, group_size: int, updates: int, world_size: int, micro: int | None) -> None:
    if group_size < 2:
        raise ConfigError(
            f"rollout.group_size = {group_size}: a group needs at least 2 completions, because the advantage compares "
            "the responses to one prompt; 8 is usual"
        )
    counts = {
        "rollout.prompts_per_step": prompts,
        "train.num_mini_batches": updates,
        "number of ranks": world_size,
        "train.micro_batch_size": 1 if micro is None else micro,
    }
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} = {value}: must be at least 1")
    if updates > prompts * group_size:
        total = prompts * group_size
        raise ConfigError(
            f"train.num_mini_batches = {updates} is more than the {total} sequences of a step "
            f"({prompts} prompts x {group_size} responses); take at most {total}, or at least "
            f"{-(-updates // group_size)} prompts per step"
        )


def _unshareable(prompts: int, group_size: int, updates: int, world_size: int) -> str:
    """Names the ranks and the group sizes next to ``group_size`` that cut every update into equal shares."""

    def works(group: int, ranks: int) -> bool:
        return prompts * group % (updates * ranks) == 0

    ranks = [w for w in range(1, max(8, 2 * world_size) + 1) if works(group_size, w)]
    below = next((g for g in range(group_size - 1, 1, -1) if works(g, world_size)), None)
    above = next(g for g in range(group_size + 1, group_size + updates * world_size + 1) if works(g, world_size))
    groups = [str(group) for group in (below, above) if group is not None]
    ways = [f"{', '.join(map(str, ranks))} ranks"] if ranks else []
    ways.append(f"rollout.group_size = {' or '.join(groups)}")
    return (
        f"{prompts} prompts x {group_size} responses = {prompts * group_size} sequences in "
        f"{updates} update{'s' if updates > 1 else ''} cannot be shared equally by {world_size} ranks; "
        f"what works: {', or '.join(ways)}"
    )


def _cut_notes(sizes: tuple[int, ...], group_size: int) -> list[str]:
    notes = []
    if sizes[0] != sizes[-1]:
        notes.append(f"updates have {sizes[-1]} or {sizes[0]} sequences: the step does not divide evenly")
    if len(sizes) > 1 and any(size % group_size for size in sizes):
        notes.append("some groups are cut between updates; their advantages are computed before the cut")
    return notes


def _micro_notes(per_rank: int, group_size: int, micro: int | None) -> list[str]:
    if micro is None:
        return []
    if micro > per_rank:
        return [f"1 micro-batch of {per_rank}: train.micro_batch_size = {micro} is more than there is"]
    if micro < per_rank and micro % group_size and group_size % micro:
        return [
            "some micro-batches hold rows of several groups; advantages are computed from whole groups before the "
            "cut, so they do not change"
        ]
    return []


def _epoch_notes(num_prompts: int | None, epoch: tuple[int, int] | None) -> list[str]:
    if epoch is None or not epoch[1]:
        return []
    left = epoch[1]
    verb = "is" if left == 1 else "are"
    return [
        f"{epoch[0]} step{'s' if epoch[0] > 1 else ''} per epoch of {num_prompts} prompts; {left} "
        f"prompt{'s' if left > 1 else ''} {verb} left over and carried into the next epoch"
    ]
