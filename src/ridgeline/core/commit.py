"""Folding back: the results of a step become tokens, forks and ends.

It needs only the step and its output, and keeps nothing between two calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Listing
from itertools import count, zip_longest

from ridgeline.core.request import Request, Sequence, Status
from ridgeline.core.scheduling.queues import Queues
from ridgeline.core.step import TOO_FEW, Event, FinishReason, Step, StepOutput, TokenLogprobs, Work


def resume(request: Request) -> None:
    """Let a new request's answers go on behind the tokens that they have from elsewhere.

    Each token is judged as when it was drawn, so some of the answers may have ended. What draws
    nothing, a search or a vector, begins again. Raises ValueError for what cannot be gone on with.
    """
    seeds, answers = request.sequences[0].seeds, request.answers
    if not (seeds and any(answers)):
        request.answers = ()
        return
    if len(answers) != len(seeds):
        raise ValueError(f"answers has {len(answers)}, but the request asks for {len(seeds)}")
    request.sequences[0].seeds, others = seeds[:1], enumerate(seeds[1:], start=1)
    request.sequences += [Sequence(request, i, [*request.prompt], (seed,)) for i, seed in others]
    for seq, answer in zip(request.sequences, answers, strict=True):
        for token in answer:
            if seq.finish_reason is not None:
                raise ValueError(f"answers[{seq.id[1]}] goes on behind its end")
            seq.tokens.append(token)
            seq.num_pending += 1
            seq.finish_reason, _ = _verdict(seq, token)
        seq.num_before = seq.num_generated
        seq.status = Status.WAITING if seq.finish_reason is None else Status.FINISHED
        if seq.text is not None:
            seq.text.take()  # its reader has it
    if request.is_finished:
        raise ValueError("answers have all ended: nothing is left to say")


def commit(queues: Queues, step: Step, output: StepOutput) -> list[Event]:
    """Fold a step's results into its sequences; return their events."""
    queues.kv.forget_copies()
    events: list[Event] = []
    alive = queues.alive
    is_plain = not (output.logprobs or output.prompt_logprobs or output.errors)
    for i, (work, tokens) in enumerate(zip(step.work, output.tokens, strict=True)):
        seq = alive.get(work.seq_id)
        if seq is None:  # aborted while its step was computed
            continue
        if not is_plain:
            if i in output.errors:
                ended = [seq]
                if seq.request.search:  # beams end together
                    ended = _conclude(queues, seq.request, seq.request.params.n)
                events += [_end(queues, one, FinishReason.ERROR, output.errors[i]) for one in ended]
                continue
            ranked_prompt = output.prompt_logprobs.get(i, ())
            seq.request.prompt_logprobs.update(enumerate(ranked_prompt, work.start + 1))
        _advance(queues, seq, len(work.tokens) - work.drafts)
        if work.save:
            queues.kv.publish_states(seq, work)
        ranked = () if is_plain else output.logprobs.get(i, ())
        if work.drafts:
            events += _verify(queues, seq, work, tokens, ranked)
        elif len(work.seeds) > 1:
            for member, token, logprobs in zip_longest(_fork(queues, seq), tokens, ranked):
                events.append(_append(queues, member, token, logprobs))
        elif work.seeds:
            events.append(_append(queues, seq, tokens[0], ranked[0] if ranked else None))
        elif work.pool:
            vector = output.vectors.get(i, ())  # a simulation has none
            events.append(_end(queues, seq, FinishReason.STOP)._replace(vector=vector))
        elif work.top:
            seq.candidates, seq.similarity = output.top[i], output.similarity.get(i, 0.0)
            if all(beam.candidates for beam in seq.request.sequences):
                events += _next_round(queues, seq.request)
    return events


def _advance(queues: Queues, seq: Sequence, num_tokens: int) -> None:
    """Count tokens whose K/V are in the cache now."""
    seq.num_computed += num_tokens
    seq.num_pending -= num_tokens
    if seq.num_computed >= seq.publish_at:
        queues.kv.publish(seq)


def _verify(
    queues: Queues,
    seq: Sequence,
    work: Work,
    tokens: tuple[int, ...],
    ranked: tuple[TokenLogprobs, ...],
) -> Iterator[Event]:
    """Yield the events of draws behind drafts, as the steps without them would have made them.

    A draw counts if it follows from the drafts before it, that is, if all of them are right. A
    state has seen all of them or none: then right ones before a wrong one are pending again.
    """
    states, i = queues.kv.states, 0
    drafts = work.tokens[len(work.tokens) - work.drafts :]
    seq.request.num_drafts += 1
    seq.request.num_draft_tokens += len(drafts)
    for i, (token, draft) in enumerate(zip(tokens, (*drafts, None), strict=False)):
        if i:  # there is a draw behind the draft before, so it was right, and its K/V is there
            seq.request.num_accepted_tokens += 1
            if states is None:
                _advance(queues, seq, 1)
        yield _append(queues, seq, token, ranked[i] if ranked else None)
        if token != draft or seq.status is Status.FINISHED:
            break
    queues.kv.release_drafts(seq)
    if states is not None and seq.status is not Status.FINISHED:
        is_right = i == len(drafts)
        states.settle(seq, is_right=is_right)
        if is_right:
            _advance(queues, seq, len(drafts))


def abort(queues: Queues, request: Request) -> list[Event]:
    """End a request now, whatever its state, even while its step is being computed."""
    if request.search:
        _conclude(queues, request, request.params.n)
    alive = [seq for seq in request.sequences if seq.status is not Status.FINISHED]
    return [_end(queues, seq, FinishReason.ABORT) for seq in alive]


def _append(queues: Queues, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> Event:
    """Add a sampled token and see whether it is the last."""
    seq.tokens.append(token)
    seq.num_pending += 1
    return _judge(queues, seq, token, logprobs)


def _judge(queues: Queues, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> Event:
    """Say what its last token means for a sequence; end it if it is the last."""
    reason, stopped_by = _verdict(seq, token)
    if reason is not None:
        queues.finish(seq, reason)
    text = "" if seq.text is None else seq.text.take()
    return Event(seq.id, token, text, logprobs, reason, stopped_by, None)


def _verdict(seq: Sequence, token: int) -> tuple[FinishReason | None, str | int | None]:
    """Let text and constraint know a sequence's last token; say whether it ends there, and why."""
    request = seq.request
    if token in request.stop_ids:  # its text is not part of the answer
        return FinishReason.STOP, token if token in request.params.stop_token_ids else None
    may_stop = seq.num_generated > request.params.min_tokens
    if seq.text is not None and (stop := seq.text.feed(token, may_stop)) is not None:
        return FinishReason.STOP, stop
    if seq.constraint is not None:
        seq.constraint.accept(token)
        if seq.constraint.is_over:
            return FinishReason.STOP, None
    return FinishReason.LENGTH if len(seq.tokens) >= request.max_len else None, None


def _fork(queues: Queues, parent: Sequence) -> tuple[Sequence, ...]:
    """Give each seed beyond the first a sequence that shares the prompt's blocks."""
    request = parent.request
    for index, seed in enumerate(parent.seeds[1:], start=1):
        child = Sequence(request, index, list(parent.tokens), (seed,))
        request.sequences.append(child)
        queues.fork(parent, child)
    parent.seeds = parent.seeds[:1]
    return tuple(request.sequences)


def _next_round(queues: Queues, request: Request) -> Iterator[Event]:
    """Let beams that all have candidates go on as the search decides; yield answers at the end."""
    search = request.search
    assert search is not None
    beams, num_settled = request.sequences, len(search.settled)
    moves = search.advance([beam.candidates for beam in beams], [beam.similarity for beam in beams])
    if len(search.settled) > num_settled:
        chosen, entry = beams[moves[0][0]], search.settled[-1]
        queues.swap(chosen, beams[0])
        event = _judge(queues, chosen, entry.token, entry)
        yield event
        if event.finish_reason:
            _drop_search(queues, request)
            request.sequences = [chosen]
            return
    if moves:
        _move(queues, request, moves)
        return
    answers = search.answers()
    for seq, answer in zip_longest(_conclude(queues, request, request.params.n), answers):
        for entry in answer or ():
            event = _append(queues, seq, entry.token, entry)
            yield event
            if event.finish_reason:  # a form may be complete before the stop id that ended the beam
                break
        else:
            yield _end(queues, seq, FinishReason.ERROR, TOO_FEW)


def _move(queues: Queues, request: Request, moves: Listing[tuple[int, int]]) -> None:
    """Make the next beams. The first to continue a beam is that beam, the others fork from it."""
    beams, parents = request.sequences, {parent for parent, _ in moves}
    for place, beam in enumerate(beams):
        beam.candidates, beam.num_slots = (), 1
        if place not in parents:
            queues.drop(beam)
    request.sequences = []
    for parent, _ in moves:
        beam = beams[parent]
        if beam in request.sequences:
            index = next(i for i in count() if (request.id, i) not in queues.alive)
            beam = Sequence(request, index, list(beam.tokens), ())
            if (constraint := beams[parent].constraint) is not None:
                beam.constraint = constraint.fork()
            queues.fork(beams[parent], beam)
        request.sequences.append(beam)
    for beam, (_, token) in zip(request.sequences, moves, strict=True):
        beam.tokens.append(token)
        beam.num_pending += 1
        if beam.constraint is not None:
            beam.constraint.accept(token)


def _conclude(queues: Queues, request: Request, num_answers: int) -> list[Sequence]:
    """Replace beams by sequences for the answers of their search, with what is settled of them."""
    first, settled = request.sequences[0], _drop_search(queues, request)
    tokens = [*request.prompt, *(entry.token for entry in settled)]
    request.sequences = [Sequence(request, i, list(tokens), ()) for i in range(num_answers)]
    if settled:
        request.sequences[0].text = first.text
    for seq in request.sequences:
        queues.add(seq)
    return request.sequences


def _drop_search(queues: Queues, request: Request) -> list[TokenLogprobs]:
    """Drop a search and its beams; return what was settled."""
    search = queues.searching.pop(request.id).search
    assert search is not None
    for beam in request.sequences:
        if beam.status is not Status.FINISHED:
            queues.drop(beam)
    request.search = None
    return search.settled


def _end(queues: Queues, seq: Sequence, reason: FinishReason, error: str | None = None) -> Event:
    """End a sequence without another token."""
    queues.finish(seq, reason)
    text = seq.text.take() if seq.text else ""
    return Event(seq.id, None, text, None, reason, None, error)
