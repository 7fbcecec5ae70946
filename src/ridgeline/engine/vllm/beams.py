"""vLLM's beam search: its parameters as ours, our answers as its outputs."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.core.params import SamplingParams
from ridgeline.engine.outputs import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """A beam search, by vLLM's names.

    Attributes:
        beam_width: beams that are kept, all of which are returned.
        max_tokens: most tokens of an answer.
        ignore_eos: do not end at the model's own end-of-sequence ids.
        temperature: 0; beams are not drawn.
        length_penalty: above 1 favours long answers: a beam's score is divided by its length to
            this power.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def sampling(self) -> SamplingParams:
        """Return the parameters of the same search. Raises ValueError if there is none."""
        return SamplingParams(
            use_beam_search=True,
            n=self.beam_width,
            best_of=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            logprobs=0,
        )


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A beam: ``tokens`` are those of the prompt and of the answer, and ``text`` is all of it."""

    tokens: list[int]
    text: str
    cum_logprob: float
    finish_reason: str
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beams of a prompt, best first."""

    sequences: list[BeamSearchSequence]


def beams_of(output: RequestOutput, prompt: str) -> BeamSearchOutput:
    """Return the answers to a prompt of this text as beams."""
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                [*output.prompt_token_ids, *one.token_ids],
                prompt + one.text,
                one.cumulative_logprob or 0.0,
                one.finish_reason,
                one.stop_reason,
            )
            for one in output.outputs
        ]
    )
