"""What the command gives a server: its rules, guards, receipts and audit, each as a stage.

The order in which answers pass them is decided here. Nothing is imported that a server has no use
for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request

from ridgeline.engine.llm import LLM
from ridgeline.engine.setup.home import default_home
from ridgeline.serve.answer.response_builder import ResponseBuilder
from ridgeline.serve.answer.schemas import ERRORS
from ridgeline.serve.answer.stages import AnswerRow
from ridgeline.serve.engine.request_stream import Hold, StreamCaller
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.keys import Keys
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.model_server import ModelServer
from ridgeline.serve.prepare import Ids, Prepared
from ridgeline.trust.guards.guard_models import GuardModels

if TYPE_CHECKING:  # imported only where a server has them
    from ridgeline.trust.audit.requests import AuditObserver
    from ridgeline.trust.guards.guard_loading import Judge
    from ridgeline.trust.receipts.receipt_signer import ReceiptRecorder, ReceiptSigner
    from ridgeline.trust.receipts.signing import Signer
    from ridgeline.trust.rules.file import RulesFile
    from ridgeline.trust.rules.policy_file import PolicyFile, RequestPolicy


class ServerStages:
    """The stages of one server.

    Attributes:
        observer: has a line of the audit log written about each request, if there is a log.
        models: guards, which judge texts, by their names.
    """

    _server: ModelServer
    _guards: GuardModels
    _policies: PolicyFile | None = None

    def __init__(
        self,
        options: ServeOptions,
        keys: Keys,
        observer: AuditObserver | None = None,
        models: Mapping[str, LLM] | None = None,
    ) -> None:
        """Do what ``options`` ask for, for these ``keys``."""
        self._options, self._keys = options, keys
        self.observer, self.models = observer, models or {}

    def open(self, server: ModelServer) -> None:
        """Begin with a server. Raises OSError or ValueError if that cannot be."""
        self._server = server
        self._guards = GuardModels(self._own_judge, server.is_called, self._judges())
        if self._options.rules:
            from ridgeline.trust.rules.policy_file import PolicyFile

            labels, count = lambda: self._keys.labels, server.metrics.count_rule
            of_file = labels, count, self._check_rules, self._guards.check
            self._policies = PolicyFile(self._options.rules, *of_file)
        if self._options.receipt_key:
            _ = self.signer  # a file that has no key is told now

    def add_routes(self, app: FastAPI) -> None:
        """Add routes to the application over the server."""
        from ridgeline.trust.guards.moderations import add_moderations

        add_moderations(app, self._server, self._guards)
        if self.observer:
            self.observer.add_routes(app)
        add_receipts(app, lambda: self.signer)

    def trouble(self) -> str | None:
        """Return why the process should be replaced, if it should."""
        return self._guards.trouble()

    # --- rules ---------------------------------------------------------------------------------

    @property
    def digest(self) -> bytes:
        """What answers hang on because of rules, nothing where there are none."""
        return self._policies.now.digest if self._policies else b""

    def limits_of(self, label: str) -> Mapping[str, Any]:
        """Return the limits of a key by the names of the rules' file, which go first."""
        return self._policies.now.of(label).limits if self._policies else {}

    def reload(self) -> str:
        """Read the rules again; return what the log says of it, nothing where there are none."""
        if self._policies is None:
            return ""
        try:
            self._policies.reload()
        except (OSError, ValueError) as error:
            return f"the rules were not reloaded; the old ones stay in force: {error}"
        return f"the rules were read again: version {self._policies.now.version}"

    def screen(self) -> RequestPolicy | None:
        """Return the rules for the present request, if there are any."""
        return self._policies.here() if self._policies else None

    def _check_rules(self, rules: RulesFile) -> None:
        """Raise ValueError for rules that this server cannot hold."""
        file = self._options.rules
        if self._server.is_traced and not rules.allows_trace:
            message = "--trace writes answers as no rule has seen them: without it, or with "
            raise ValueError(f"{message}trace = true at the top of {file}")
        if rules.audited and not self.observer:
            raise ValueError(f"{file}: audit in [keys.{rules.audited}] needs --audit DIR")

    # --- guards --------------------------------------------------------------------------------

    def _own_judge(self) -> Judge | None:
        from ridgeline.trust.guards.guard_loading import judge_of  # most servers have no guard

        server = self._server
        return judge_of(server.name, server.text, server.engine, server.work.prompts)

    def _judges(self) -> dict[str, Judge]:
        """Return the guards of ``--guard``. Raises ValueError for a model that is none."""
        if not self.models:
            return {}
        from ridgeline.trust.guards.guard_loading import known_judge

        engines, turns = self._server.engines, self._server.work.prompts
        return {
            name: known_judge(name, llm.text, engines[name], turns)
            for name, llm in self.models.items()
        }

    async def judged(
        self, request: Request, body: Any, prompts: Sequence[Ids], param: str
    ) -> Hold | None:
        """Have guards judge a request's prompts; return what holds its answers, if they do.

        Raises ApiError if they forbid a prompt.
        """
        rules, state, server = self.screen(), request.state, self._server
        if rules is None or not (rules.key.input_judges or rules.key.output_judges):
            return None
        from ridgeline.trust.guards.checks import Checks, conversations_of  # few have any

        root = server.cache_root(state.tenant)
        caller = StreamCaller(state.tenant, state.request_id, root, state.is_background)
        read = partial(conversations_of, body, prompts, server.text.tokenizer.decode, rules)
        conversations = await server.work.prompts.run(read)
        goes_on = bool(getattr(body, "continue_final_message", None))
        checks = Checks(rules, self._guards, caller, conversations, goes_on=goes_on)
        await checks.check_read(param)
        return checks.screen if rules.key.output_judges else None

    # --- answers -------------------------------------------------------------------------------

    def row(self, answers: ResponseBuilder, prepared: Prepared) -> AnswerRow:
        """Return what answers pass before they are shown. Raises ApiError.

        A receipt is about what the engine has sent, so it comes before the rules.
        """
        rules = self.screen()
        recorders = (self._recorder(answers, prepared, rules),) if answers.body.receipt else ()
        if rules is None:
            return AnswerRow(recorders)
        from ridgeline.trust.rules.choice import FilteredAnswers  # only where there are rules

        text, is_constrained = self._server.text, prepared.is_constrained
        filtered = FilteredAnswers(rules, text, answers, is_constrained=is_constrained)
        return AnswerRow(recorders, filtered)

    @cached_property
    def signer(self) -> Signer | None:
        """What signs receipts. Raises OSError or ValueError for a key that cannot be had."""
        return signer_of(self._options.receipt_key)

    @cached_property
    def _receipt_signer(self) -> ReceiptSigner:
        """What makes receipts. Raises OSError or ValueError as ``signer`` does."""
        from ridgeline.trust.receipts.receipt_signer import ReceiptSigner  # few ask for a receipt

        of = self._server
        return ReceiptSigner(self.signer, of.name, of.facts, of.files, of.max_model_len)

    def _recorder(
        self, answers: ResponseBuilder, prepared: Prepared, rules: RequestPolicy | None
    ) -> ReceiptRecorder:
        """Return what states answers at their end. Raises ApiError if it cannot be signed."""
        from ridgeline.trust.receipts.receipt_signer import ReceiptRecorder

        is_ruled = rules and (rules.key.output or rules.key.output_judges)
        of_rules = rules.name if rules and is_ruled else None
        try:
            return ReceiptRecorder(self._receipt_signer, answers, prepared.form, of_rules)
        except (OSError, ValueError):
            raise no_key() from None


@contextmanager
def server_stages(
    options: ServeOptions, load_guard: Callable[[str], AbstractContextManager[LLM]], keys: Keys
) -> Iterator[ServerStages]:
    """Have the stages that ``options`` ask for; ``load_guard`` loads a model of ``--guard``.

    Raises OSError or ValueError if one cannot be had.
    """
    with observing(options) as observer, _loaded(options.guard or (), load_guard) as models:
        yield ServerStages(options, keys, observer, models)


@contextmanager
def _loaded(
    guards: Sequence[str], load: Callable[[str], AbstractContextManager[LLM]]
) -> Iterator[dict[str, LLM]]:
    """Yield guards by the names that requests and rules call them."""
    names = [Path(guard).name for guard in guards]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"--guard: two guards are named {name!r}: rename one of the files or folders"
            )
    with ExitStack() as stack:
        yield {Path(guard).name: stack.enter_context(load(guard)) for guard in guards}


@contextmanager
def observing(options: ServeOptions, name: str = "") -> Iterator[AuditObserver | None]:
    """Have what is told of each request, if ``options`` ask for a log of them.

    It is in a folder of this name below theirs. Raises OSError or ValueError if it cannot be
    written.
    """
    if options.audit is None:
        yield None
        return
    from ridgeline.trust.audit.log import audit_log
    from ridgeline.trust.audit.requests import AuditObserver

    with audit_log(options, name) as log:
        yield AuditObserver(log)


def signer_of(file: Path | None) -> Signer | None:
    """Return what signs with the key in a file, by default that of this user.

    None without the package for it, unless a file was named. Raises OSError or ValueError for a
    file that cannot be read, or has no key.
    """
    from ridgeline.trust.receipts.signing import KEY_FILE, NEEDED, Signer

    try:
        return Signer(file or default_home() / KEY_FILE)
    except ModuleNotFoundError:
        if file:
            raise ValueError(f"--receipt-key: {NEEDED}") from None
        return None


def no_key() -> ApiError:
    """Return what clients are told where there is no key, without the path of its file."""
    message = "the key of receipts cannot be read or made: the operator may name another"
    return ApiError(503, f"{message} (--receipt-key)", code="receipts_failed")


def add_receipts(app: FastAPI, load_signer: Callable[[], Signer | None]) -> None:
    """Add the route; ``load_signer`` raises OSError or ValueError where there is no key."""

    @app.get("/v1/receipts/key", responses=ERRORS)
    def key() -> dict[str, str]:
        """Return the public key that receipts are signed with, in PEM, and its name."""
        try:
            signer = load_signer()
        except (OSError, ValueError):
            raise no_key() from None
        if signer is None:
            message = "receipts are not signed here: ridgeline[receipts] is not installed"
            raise ApiError(404, message, code="receipts_unsigned")
        return {"keyid": signer.public.name, "public_key": signer.public.pem}
