"""Conversations to token ids in the model's chat format.

The format itself comes from ``deepseek-recipe``, the package of the model's vendor; what is added here are checks that
name the field at fault, numeric reasoning efforts, and an encoding in which text never becomes a control token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deepinfer.errors import CheckpointError
from deepinfer.tokenizer.chat_messages import MessageReader
from deepinfer.tokenizer.tokenizer import Tokenizer
from deepinfer.tokenizer.valid_text import refusal, require_text

Effort = Literal["low", "high", "xhigh", "max"]
ToolChoice = Literal["auto", "none", "required"]

_EFFORT_NAMES: dict[str, Effort | None] = {
    "none": None,  # thinking off, unless it is asked for by name
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "xhigh",
    "ultra": "max",
    "max": "max",
}
_EFFORT_LINE = "Reasoning Effort: "
_TOOL_CHOICES = ("auto", "none", "required")
_MODEL_NAME = "DeepSeek-V4.1-Flash"


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a rendered prompt."""

    text: str
    is_control: bool
    """The piece is one control token rather than text."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation in the chat format."""

    segments: tuple[Segment, ...]
    image_token: str
    """Control spelling that stands for an image here; the tokenizer's own may differ."""
    num_images: int

    @property
    def text(self) -> str:
        """The prompt for human eyes. Encoding it again is not safe: user text may spell control tokens."""
        return "".join(segment.text for segment in self.segments)


def encode_chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    tokenizer: Tokenizer,
    thinking: bool | None = None,
    reasoning_effort: str | int | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: ToolChoice = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[int]:
    """Token ids of a conversation, BOS included, one image placeholder per image part.

    Args:
        messages: OpenAI form: ``role`` (system, user, assistant, tool, latest_reminder), ``content`` (a string or a
            list of text and image parts), and for assistants ``reasoning_content``, ``tool_calls`` and ``prefix``.
        tokenizer: must have the control tokens that this conversation uses.
        thinking: None means on, unless ``reasoning_effort`` is ``"none"``.
        reasoning_effort: a name (minimal, low, medium, high, xhigh, ultra, max, none) or a number from 1 to 100. None
            gives the format's default, 75. Without thinking it has no effect.
        tools: function tools in the OpenAI form.
        tool_choice: auto, none (leaves the tools out) or required (opens the call; only without thinking).
        add_generation_prompt: end with the opening of an assistant turn.
        continue_final_message: leave the last assistant message open for the model to go on. It replaces the
            generation prompt.
    Raises:
        RequestError: names the field, such as ``messages[2].content``.
        CheckpointError: the tokenizer lacks a control token that the format needs.
    Source: spec 9; ``deepseek-recipe`` (V4.1 encoding).
    """
    chat = render_chat(
        messages,
        thinking=thinking,
        reasoning_effort=reasoning_effort,
        tools=tools,
        tool_choice=tool_choice,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    ids: list[int] = []
    for segment in chat.segments:
        if not segment.is_control:
            ids += tokenizer.encode(segment.text, add_bos=False, parse_special=False, field="messages")
        elif segment.text == chat.image_token:
            ids.append(tokenizer.image_token_id)
        else:
            ids.append(_control_id(tokenizer, segment.text))
    return ids


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool | None = None,
    reasoning_effort: str | int | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: ToolChoice = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> RenderedChat:
    """The prompt of a conversation as text and control tokens. Arguments and errors as in :func:`encode_chat`."""
    from deepseek_recipe import Conversation, DeepseekV41Encoding

    effort_name, effort_number = _effort(reasoning_effort)
    if not isinstance(thinking, bool | None):
        raise refusal("thinking", thinking, why="it is no truth value", fix="use true, false or null")
    is_thinking = reasoning_effort != "none" if thinking is None else thinking
    _check_tool_choice(tool_choice, is_thinking, tools)
    reader = MessageReader(messages, continue_final_message)
    conversation = Conversation(
        reader.read(),
        thinking_mode=is_thinking,
        tools=_tool_definitions(tools),
        tool_choice=tool_choice,
        reasoning_effort=effort_name,
    )
    rendered = DeepseekV41Encoding().render_conversation(conversation)
    segments = _segments(rendered.prompt, rendered.special_ranges)
    if is_thinking and effort_number is not None:
        segments[2] = _with_effort(segments[2], effort_number)
    if not add_generation_prompt and not reader.continues_final:
        segments = _without_generation_prompt(segments)
    return RenderedChat(tuple(segments), reader.image_token, len(rendered.image_sources))


def _effort(value: str | int | None) -> tuple[Effort | None, int | None]:
    """Name for the prompt library and number to write instead of the name's."""
    fix = f"use a number from 1 to 100 or one of {', '.join(_EFFORT_NAMES)}"
    if value is None:
        return None, None
    if isinstance(value, str):
        if value not in _EFFORT_NAMES:
            raise refusal("reasoning_effort", value, why="there is no such effort", fix=fix)
        return _EFFORT_NAMES[value], None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 100:
        raise refusal("reasoning_effort", value, why="it is no whole number from 1 to 100", fix=fix)
    return "max", value


def _check_tool_choice(tool_choice: str, is_thinking: bool, tools: object) -> None:
    if tool_choice not in _TOOL_CHOICES:
        fix = f"use one of {', '.join(_TOOL_CHOICES)}"
        raise refusal("tool_choice", tool_choice, why="the chat format has no such choice", fix=fix)
    if tool_choice == "required" and is_thinking:
        raise refusal(
            "tool_choice", tool_choice, why="the model thinks before it calls a tool", fix="turn thinking off"
        )
    if tool_choice == "required" and not tools:
        raise refusal("tool_choice", tool_choice, why="there are no tools to call", fix="send tools")


def _tool_definitions(tools: Sequence[Mapping[str, Any]] | None) -> list[Any]:
    """Check and normalise tool definitions with the vendor's own rules."""
    from deepseek_recipe import ChatCompletionRequest, ConversionError, ConversionOptions

    if not tools:
        return []
    fix = "send function tools as JSON, nested less than 100 deep"
    try:
        serialised = json.dumps(list(tools), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise refusal("tools", tools, why=f"it is not JSON: {error}", fix=fix) from error
    require_text(serialised, "tools")
    carrier = f'{{"model": "{_MODEL_NAME}", "messages": [{{"role": "user", "content": ""}}], "tools": {serialised}}}'
    try:
        return ChatCompletionRequest(carrier).convert(ConversionOptions()).conversation.tools
    except ConversionError as error:
        raise refusal("tools", tools, why=_message_of(error), fix="correct the definition") from error
    except (ValueError, RecursionError) as error:
        raise refusal("tools", tools, why=str(error), fix=fix) from error


def _message_of(error: Any) -> str:
    """The sentence inside a conversion error, whose body is the JSON of an HTTP response."""
    try:
        return str(json.loads(error.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error)


def _segments(prompt: str, special_ranges: Sequence[tuple[int, int]]) -> list[Segment]:
    segments, done = [], 0
    for start, end in special_ranges:
        if start > done:
            segments.append(Segment(prompt[done:start], False))
        segments.append(Segment(prompt[start:end], True))
        done = end
    if done < len(prompt):
        segments.append(Segment(prompt[done:], False))
    return segments


def _with_effort(segment: Segment, number: int) -> Segment:
    """Write ``number`` into the effort line, which follows BOS and the system mark in thinking mode."""
    assert segment.text.startswith(_EFFORT_LINE), f"no effort line in {segment.text[:80]!r}"
    named, rest = segment.text[len(_EFFORT_LINE) :].split(" ", 1)
    assert named.isdigit(), f"effort line reads {segment.text[:80]!r}"
    return Segment(f"{_EFFORT_LINE}{number} {rest}", False)


def _without_generation_prompt(segments: list[Segment]) -> list[Segment]:
    """Cut before the last assistant mark: the format opens an assistant turn at the end of every conversation."""
    from deepseek_recipe import SpecialToken

    mark = Segment(SpecialToken.Assistant.default_str(), True)
    last = max(index for index, segment in enumerate(segments) if segment == mark)
    return segments[:last]


def _control_id(tokenizer: Tokenizer, spelling: str) -> int:
    token_id = tokenizer.token_to_id(spelling)
    if token_id is None:
        raise CheckpointError(
            f"the tokenizer has no token {spelling!r}",
            why="the chat format of this conversation writes it",
            fix="use the tokenizer.json of a V4.1 checkpoint, or send the prompt as plain text",
        )
    return token_id
