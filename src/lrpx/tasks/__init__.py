"""What a model's logits are about, and where they are read: the tasks, as data; what a model's class tells, and what
short runs of it tell that its class does not."""

from lrpx.tasks._changes import (
    around_head as around_head,
    changes as changes,
    flags as flags,
    head_is_hooked as head_is_hooked,
    is_theirs as is_theirs,
    state as state,
)
from lrpx.tasks._logits import (
    only_rows as only_rows,
    reading as reading,
)
from lrpx.tasks._masks import Counting as Counting
from lrpx.tasks._tasks import (
    GREEDY as GREEDY,
    MASKS as MASKS,
    Task,
    accepts as accepts,
    active_dropout as active_dropout,
    border as border,
    context_length as context_length,
    count_positions as count_positions,
    end_read as end_read,
    first_weight as first_weight,
    input_device as input_device,
    input_embedding as input_embedding,
    is_named_inside as is_named_inside,
    may_hand_on as may_hand_on,
    pad_id as pad_id,
    part_of as part_of,
    pixel_argument as pixel_argument,
    position_ids as position_ids,
    refuse_unnamed as refuse_unnamed,
    seen_from as seen_from,
    signal_argument as signal_argument,
    sizes as sizes,
    source_paths as source_paths,
    takes_mask as takes_mask,
    task_of as task_of,
    task_of_class as task_of_class,
    text_config as text_config,
)
from lrpx.tasks._trials import (
    first_position as first_position,
    heeds_mask as heeds_mask,
    hides as hides,
    hides_ones as hides_ones,
    is_moved_by_field as is_moved_by_field,
    is_moved_by_ones as is_moved_by_ones,
    is_moved_by_padding as is_moved_by_padding,
    looks_back as looks_back,
    rows_alone as rows_alone,
    rows_meet as rows_meet,
    seem_to_meet as seem_to_meet,
    signals_meet as signals_meet,
)

__all__ = ["Task"]
