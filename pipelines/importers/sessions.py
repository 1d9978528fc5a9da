"""One imported session: what its later records need from its earlier ones, and the events it makes.

Takes: facts read from a transcript, each with its time and a seed that is the same in every import. Gives: events with ids made of
seed and time, redacted, stamped `imported`, without token ids. Nothing here reads a clock or makes a random number: the same
transcript gives byte-identical events, so that a second import is harmless.
Leaves out: where the facts come from (each format's module).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pipelines import events as ev
from pipelines.declining import declines
from pipelines.importers.edit_sizes import EditSize
from pipelines.importers.shell_results import TestCounts
from pipelines.importers.texts import clean, identifier, plain, stable_id
from pipelines.reading import ends_in_question
from pipelines.redaction import MESSAGE_MAX_CHARS, features, hasher, redact
from pipelines.storage import Home

NAME_CHARS: Final = 200
"""Names of tools and models are cut to this."""

_WINDOW_END_CHARS: Final = 1_000
"""No secret that is recognised by its form is longer, but for private keys, which are recognised without their end."""

Decision = Literal["accepted", "rejected", "partly", "undone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What an import puts on every event."""

    user_key: str
    consent: ev.Consent
    keep_text: bool
    client: ev.Client
    keyed: Callable[[str, str], str]
    """Keyed hash: (kind, raw) -> hex."""
    format: str = "claude-code"
    """The format's name: the surface of its sessions, and the space of its ids."""

    @classmethod
    def of(cls, home: Home, *, user: str, consent: ev.Consent, keep_text: bool, format: str, version: str = "1") -> "Stamp":
        """Return the stamp of one user's import with this deployment's hash key.

        Args:
            home: Where the key is.
            user: Whose sessions these are; only the keyed hash stays.
            consent: What may be done with them.
            keep_text: The deployment's setting.
            format: The format's name in the registry.
            version: Of the format's mapping; it changes when the same transcript gives other events.
        """
        keyed = hasher(home)
        client = ev.Client(name=f"import-{format}", version=version)
        return cls(user_key=keyed("user", user), consent=consent, keep_text=keep_text, client=client, keyed=keyed, format=format)


class Session:
    """A session under import. Each method makes events and puts them into `out`; the mapper takes them from there."""

    def __init__(self, stamp: Stamp, session_id: str, *, out: list[ev.Event], folder: str | None = None, timeless: bool = False) -> None:
        """Open a session.

        Args:
            stamp: What every event carries.
            session_id: The tool's own id of the session.
            out: Where events go.
            folder: The working folder, if known; only its keyed hash stays.
            timeless: Times are not the transcript's own: ids are made without them, and no delay is told.
        """
        self.session_id = identifier(session_id, "unnamed")
        self.out = out
        self.folder = folder
        """May become known after opening, until the first event."""
        self.started = False
        self.turn_id = f"{self.session_id}/opening"
        self.turns = 0
        self.last_ms = 0
        self._last_seed = ""
        self._stamp = stamp
        self._timeless = timeless
        self.mute = False
        """While a repeated record is mapped: it gives context, and no event."""
        self._replied_ms: int | None = None
        self._open_edits: dict[str, list[str]] = {}
        self._turn_edits: list[str] = []
        self._steps: dict[str, int] = {}
        self._tests: TestCounts | None = None

    @property
    def stamp(self) -> Stamp:
        """What every event carries."""
        return self._stamp

    def turn(self, seed: str, at: int, text: str, *, images: int = 0, turn_id: str | None = None) -> None:
        """A person's message opens a turn; terminal codes leave it."""
        text = plain(text)
        derived = features(text)
        kept = self._stamp.keep_text and self._stamp.consent != "none"
        self.turn_id = identifier(turn_id, f"{self.session_id[:96]}/{self.turns}")
        payload = ev.TurnStartedPayload(
            turn_index=self.turns,
            message=_redacted(text) if kept else None,
            message_chars=derived.chars,
            language=derived.language,
            stack_traces=derived.stack_traces,
            diffs=derived.diffs,
            images=images,
            reply_delay_ms=None if self._replied_ms is None or self._timeless else max(at - self._replied_ms, 0),
        )
        self.turns += 1
        self._turn_edits = []
        self._add(ev.TurnStarted, f"{seed}/turn", at, payload)

    def completion(
        self,
        seed: str,
        at: int,
        *,
        completion_id: str,
        model: str = "",
        finish_reason: str | None = None,
        prompt_tokens: int = 0,
        response_tokens: int = 0,
        cached_tokens: int = 0,
        duration_ms: float | None = None,
        turn_id: str | None = None,
        side: bool = False,
        said: str | None = None,
    ) -> None:
        """One model reply, without token ids.

        Args:
            seed: What the reply is in the transcript.
            at: When it was there.
            completion_id: Its identity.
            model: Name of the model.
            finish_reason: As in the contract.
            prompt_tokens: Of the request.
            response_tokens: Of the reply.
            cached_tokens: Of the request, read from the cache.
            duration_ms: Of the request.
            turn_id: The turn, where it is not the open one.
            side: A subagent's, after which nobody replies.
            said: The text for the user, where the reply calls no tool; of it only is kept whether it asks or declines.
        """
        turn = identifier(turn_id, self.turn_id)
        step = self._steps.get(turn, 0)
        self._steps[turn] = step + 1
        payload = ev.CompletionPayload(
            completion_id=identifier(completion_id, seed),
            step=step,
            model=clean(model, limit=NAME_CHARS),
            finish_reason=finish_reason,
            prompt_tokens=prompt_tokens,
            response_tokens=response_tokens,
            cached_tokens=cached_tokens,
            duration_ms=duration_ms,
            capture_error="no_token_ids",
            ends_in_question=ends_in_question(said) if said else None,
            refused=declines(said) if said else None,
        )
        if not side:
            self._replied_ms = at
        self._add(ev.Completion, f"{seed}/completion", at, payload, turn)

    def call(
        self, seed: str, at: int, *, call_id: str, name: str, arguments: object, valid: bool, completion_id: str | None = None,
        parallel_group: int | None = None, destructive: bool | None = None,
    ) -> None:  # fmt: skip
        """The policy called a tool; of a command is kept whether it destroys something (`commands.py`)."""
        payload = ev.ToolCallPayload(
            tool_call_id=call_id,
            completion_id=None if completion_id is None else identifier(completion_id, seed),
            name=clean(name, limit=NAME_CHARS),
            arguments_valid=valid,
            arguments_hash=self._stamp.keyed("arguments", arguments if isinstance(arguments, str) else repr(arguments)),
            parallel_group=parallel_group,
            destructive=destructive,
        )
        self._add(ev.ToolCall, f"{seed}/call", at, payload)

    def result(
        self, seed: str, at: int, *, call_id: str, verdict: ev.ResultClass, output: str | None = None, duration_ms: float | None = None,
        exit_code: int | None = None,
    ) -> None:  # fmt: skip
        """A tool answered, or could not."""
        payload = ev.ToolResultPayload(
            tool_call_id=call_id,
            result_class=verdict,
            duration_ms=duration_ms,
            exit_code=exit_code,
            output_bytes=None if output is None else len(output.encode("utf-8", "replace")),
        )
        self._add(ev.ToolResult, f"{seed}/result", at, payload)

    def edit(self, seed: str, at: int, *, edit_id: str, path: str, size: EditSize, call_id: str | None = None) -> None:
        """A call changed a file, or asked to."""
        payload = ev.EditProposedPayload(
            edit_id=edit_id,
            tool_call_id=call_id,
            path_hash=self._stamp.keyed("path", path),
            lines_added=size.lines_added,
            lines_removed=size.lines_removed,
            chars_added=size.chars_added,
            chars_removed=size.chars_removed,
        )
        self._add(ev.EditProposed, f"{seed}/edit", at, payload)

    def edits(self, seed: str, at: int, *, call_id: str, files: Sequence[tuple[str, EditSize]]) -> None:
        """A call changes files, or asks to: one edit a file, decided when the call's result is known (`settle`)."""
        made = [identifier(f"{call_id[:100]}/{index}" if index else call_id, seed) for index in range(len(files))]
        for index, (edit_id, (path, size)) in enumerate(zip(made, files, strict=True)):
            self.edit(f"{seed}/{index}", at, edit_id=edit_id, path=path, size=size, call_id=call_id)
        if made:
            self._open_edits[call_id] = made

    def settle(self, seed: str, at: int, *, call_id: str, verdict: ev.ResultClass) -> None:
        """A call's result decides its edits: made is accepted, stopped by the user is rejected, failed never reached the user."""
        made = self._open_edits.pop(call_id, ())
        if verdict is ev.ResultClass.OK or verdict is ev.ResultClass.USER_ABORTED:
            decision: Decision = "accepted" if verdict is ev.ResultClass.OK else "rejected"
            for index, edit_id in enumerate(made):
                self.decide(f"{seed}/{index}", at, edit_id=edit_id, decision=decision)
            self._turn_edits += made if decision == "accepted" else ()

    def undo(self, seed: str, at: int) -> None:
        """The turn's edits were taken back."""
        for index, edit_id in enumerate(self._turn_edits):
            self.decide(f"{seed}/{index}", at, edit_id=edit_id, decision="undone")
        self._turn_edits = []

    def decide(self, seed: str, at: int, *, edit_id: str, decision: Decision) -> None:
        """A person, or a mode that the person chose, decided about an edit."""
        self._add(ev.EditDecided, f"{seed}/{decision}", at, ev.EditDecidedPayload(edit_id=edit_id, decision=decision))

    def interrupt(self, seed: str, at: int, *, target: str = "turn", by: Literal["user", "policy", "system"] = "user") -> None:
        """Something was stopped before it was done."""
        self._add(ev.Interrupted, f"{seed}/interrupted", at, ev.InterruptedPayload(by=by, target=target))

    def feedback(self, seed: str, at: int, *, source: str, score: float) -> None:
        """A person said what they thought: -1 to 1."""
        self._add(ev.Feedback, f"{seed}/feedback", at, ev.FeedbackPayload(source=source, score=score))

    def tests(self, seed: str, at: int, found: TestCounts) -> None:
        """Tests ran; `before` is the session's previous run."""
        before, self._tests = self._tests, found
        payload = ev.TestRunPayload(
            passed_before=before.passed if before else None,
            failed_before=before.failed if before else None,
            passed_after=found.passed,
            failed_after=found.failed,
        )
        self._add(ev.TestRun, f"{seed}/tests", at, payload)

    def end(self, *, reason: Literal["done", "abandoned", "idle"] = "idle") -> None:
        """The transcript ends here; one that has grown since gets another end."""
        if self.started:
            seed = f"ended/{self._last_seed}"
            self.out.append(ev.SessionEnded(**self._envelope(None, self.last_ms, seed), payload=ev.SessionEndedPayload(reason=reason)))

    def _add(self, kind: Any, seed: str, at: int, payload: ev.Payload, turn_id: str | None = None) -> None:
        if self.mute:
            return
        if not self.started:
            self.started = True
            repository = self._stamp.keyed("repository", self.folder) if self.folder else None
            opening = ev.SessionStartedPayload(surface=self._stamp.format, repository=repository)
            self.out.append(ev.SessionStarted(**self._envelope(None, at, "started"), payload=opening))
        self.last_ms, self._last_seed = max(self.last_ms, at), seed
        self.out.append(kind(**self._envelope(turn_id or self.turn_id, at, seed), payload=payload))

    def _envelope(self, turn_id: str | None, at: int, seed: str) -> dict[str, Any]:
        event_id = stable_id(f"{self.session_id}/{seed}", 0 if self._timeless else at, space=self._stamp.format)
        return envelope(self._stamp, session_id=self.session_id, turn_id=turn_id, at=at, event_id=event_id)


def envelope(stamp: Stamp, *, session_id: str, turn_id: str | None, at: int, event_id: str) -> dict[str, Any]:
    """Return what every event of an import has around its payload."""
    return {
        "event_id": event_id,
        "session_id": session_id,
        "turn_id": turn_id,
        "occurred_at_ms": at,
        "recorded_at_ms": at,  # not the clock: a second import must give the same bytes
        "origin": "imported",
        "arm": "none",
        "user_key": stamp.user_key,
        "consent": stamp.consent,
        "client": stamp.client,
    }


def ends(sessions: Iterable[Session]) -> Iterator[ev.Event]:
    """Yield the ends of sessions that stay open until the last file was read."""
    for session in sessions:
        session.out = []
        session.end()
        yield from session.out


def _redacted(text: str) -> str:
    """Return a message's beginning without secrets.

    Only what can be kept is redacted, as pasted logs reach megabytes. A secret that the window cuts in two stands at its end, which
    is dropped.
    """
    if len(text) <= MESSAGE_MAX_CHARS + _WINDOW_END_CHARS:
        return redact(text)[0][:MESSAGE_MAX_CHARS]
    window = redact(text[: MESSAGE_MAX_CHARS + _WINDOW_END_CHARS])[0]
    return window[: min(MESSAGE_MAX_CHARS, len(window) - _WINDOW_END_CHARS)]
