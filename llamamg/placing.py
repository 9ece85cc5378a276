"""Asking plugins where busy sequences should lie: in which decode group, and at which id of it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from llamamg.arrange import Arranger
from llamamg.batch import StepState
from llamamg.hookcalls import HookCalls
from llamamg.layout import Layout
from llamamg.moves import Moves
from llamamg.sequence import Sequence, SequenceState
from llamamg.slot import Slot
from llamamg.staying import Staying

Show = Callable[[StepState, Seq[int]], None]


class Placing:
    """Remembers which contexts changed, and asks once for each change, or until a plugin has decided. Runs on the engine thread."""

    def __init__(
        self,
        slots: list[Slot],
        calls: HookCalls,
        arranger: Arranger,
        moves: Moves,
        layout: Layout,
        show: Show,
        undrafted: set[int],
        staying: Staying,
    ) -> None:
        self._slots, self._calls, self._arranger, self._moves = slots, calls, arranger, moves
        self._layout, self._show = layout, show
        self._undrafted = undrafted  # contexts in which nobody may draft in the next step
        self._staying = staying
        self._changed: set[int] = set()  # contexts whose set of busy slots is another one
        self._undecided: set[int] = set()  # contexts in which nothing changed, but a plugin wants to be asked again
        self._unbalanced = False

    @property
    def due(self) -> bool:
        """Whether there is anything to ask."""
        return bool(self._changed or self._undecided) or self._staying.is_due

    def note(self, slot: Slot) -> None:
        """A sequence began, ended or moved there."""
        self._changed.add(slot.group)
        self._unbalanced = True
        self._staying.reset()

    def ask(self, state: StepState, free: Seq[int]) -> None:
        """Let plugins move sequences between contexts, and within each of the `free` ones."""
        hooks = self._calls.hooks
        if any(slot.restoring for slot in self._slots):
            return  # cells being copied must stay where they are; asked again afterwards
        is_due = self._staying.is_due
        if is_due:
            self._undecided.update(slot.group for slot in self._slots if slot.stays)
            self._unbalanced = True
            self._staying.mark(self._slots, free)
        if self._unbalanced and hooks.balance_groups and self._layout.n_contexts > 1:
            if not is_due:
                self._staying.mark(self._slots, free)
            self._balance(state)
        self._unbalanced = False
        if not hooks.arrange_slots:
            self._changed.clear()
            self._undecided.clear()
            return
        for context in (self._changed | self._undecided).intersection(free):
            if self._layout.n_contexts > 1 and self._moves.involved(context):
                continue  # asked again when they are through
            here = [slot for slot in self._slots if slot.context == context]
            going_back = [slot.sequence for slot in here if slot.sequence is not None and slot.sequence.goes_back]
            if going_back:
                if context in self._changed and any(s.state is SequenceState.DECODE for s in going_back):
                    self._undrafted.add(context)  # so that in the next step nobody does
                continue
            if self._layout.n_contexts > 1:
                self._show(state, (context,))
                state.slots = here
            if context in self._changed:
                self._staying.mark(here, free)
            self._changed.discard(context)
            self._undecided.discard(context)
            if self._arranger.arrange(state):
                self._undecided.add(context)
            state.slots = self._slots
            for sequences in (state.decoding, state.prefilling):
                sequences.sort(key=by_seq_id)  # the moves changed their ids

    def _balance(self, state: StepState) -> None:
        movable = {
            slot.seq_id
            for slot in self._slots
            if not slot.moving
            and slot.seq_id == slot.home
            and self._arranger.is_settled(slot.context)
            and not (slot.sequence is not None and slot.sequence.goes_back)
        }

        staying = {slot.seq_id for slot in self._slots if slot.stays}

        def complaint(moves: list[tuple[int, int]]) -> str | None:
            named = [id_ for move in moves for id_ in move]
            if len(set(named)) != len(named):
                return "an id is named twice"
            return next((text for move in moves if (text := self._why_not(*move))), None)

        for source, target in self._calls.first("balance_groups", state, check=complaint) or ():
            if source in movable and target in movable and target not in staying:
                self._moves.request(source, target)

    def _why_not(self, source: int, target: int) -> str | None:
        at = {slot.home: slot for slot in self._slots}
        if source not in at or target not in at or at[source].sequence is None or at[target].sequence is not None:
            return f"cannot move sequence {source} to {target}: the first must be busy and the second idle"
        if at[source].group == at[target].group:
            return f"sequences {source} and {target} are in the same group"
        return None


def by_seq_id(sequence: Sequence) -> int:
    """libllama joins sequences into one ubatch only in increasing, consecutive order of their ids."""
    return sequence.slot.seq_id
