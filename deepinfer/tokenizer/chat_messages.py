"""Check chat messages in the OpenAI form and turn them into the prompt library's conversation objects."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from deepinfer.tokenizer.valid_text import refusal, require_text

ROLES = ("system", "user", "assistant", "tool", "latest_reminder")
_IMAGE_PARTS = ("image_url", "image")
_ROLES_WITH_IMAGES = ("system", "user", "tool")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_MARK = "｜DSML｜"
_CLOSING_MARK = "</" + _MARK


class MessageReader:
    """Reads the messages of one conversation in order.

    Text stays text: an image is written as :attr:`image_token`, a string that occurs in none of the messages, so that
    a user who types the image placeholder does not shift the images.

    Args:
        messages: mappings with ``role`` and ``content`` and the fields of their role.
        continue_final: the last message is an unfinished assistant turn.
    Raises:
        RequestError: names ``messages[index].field``.
    """

    def __init__(self, messages: object, continue_final: bool) -> None:
        if not isinstance(messages, list | tuple):
            raise refusal("messages", messages, why="it is no list", fix="send a list of messages")
        if not messages:
            raise refusal("messages", messages, why="there is nothing to answer", fix="send at least one message")
        self._messages = messages
        self._roles = [self._role(index) for index in range(len(messages))]
        self.continues_final = continue_final or self._has_prefix_flag()
        if self.continues_final and self._roles[-1] != "assistant":
            raise refusal(
                f"messages[{len(messages) - 1}].role",
                self._roles[-1],
                why="only an assistant message can be continued",
                fix="end with an assistant message, or leave continue_final_message off",
            )
        self.image_token = self._unused_string()

    def read(self) -> list[Any]:
        """The library's message objects, in order."""
        readers = {
            "system": self._system,
            "user": self._user,
            "assistant": self._assistant,
            "tool": self._tool,
            "latest_reminder": self._reminder,
        }
        self._check_tool_results()
        return [readers[role](index) for index, role in enumerate(self._roles)]

    # ---- fields -------------------------------------------------------------------------------------------------

    def _role(self, index: int) -> str:
        message = self._messages[index]
        if not isinstance(message, Mapping):
            raise refusal(f"messages[{index}]", message, why="it is no object", fix="send role and content")
        role = message.get("role")
        if role not in ROLES:
            fix = f"use one of {', '.join(ROLES)}"
            raise refusal(f"messages[{index}].role", role, why="the chat format has no such role", fix=fix)
        return role

    def _has_prefix_flag(self) -> bool:
        for index, message in enumerate(self._messages):
            if message.get("prefix") and (index + 1 < len(self._messages) or self._roles[index] != "assistant"):
                raise refusal(
                    f"messages[{index}].prefix",
                    message["prefix"],
                    why="only an assistant message at the end can be continued",
                    fix="remove it",
                )
        return bool(self._messages[-1].get("prefix"))

    def _unused_string(self) -> str:
        contents = [message.get("content") for message in self._messages]
        parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
        texts = [text for text in contents if isinstance(text, str)]
        texts += [str(part.get("text")) for part in parts if isinstance(part, Mapping)]
        token, count = "\ue000image\ue001", 0
        while any(token in text for text in texts):
            token, count = f"\ue000image{count}\ue001", count + 1
        return token

    def _content(self, index: int, *, may_be_absent: bool = False) -> tuple[str, int]:
        """Text of a message and its number of images. Parts are joined by an empty line, as the chat format does."""
        field, value = f"messages[{index}].content", self._messages[index].get("content")
        if value is None and may_be_absent:
            return "", 0
        if isinstance(value, str):
            return require_text(value, field), 0
        if not isinstance(value, list | tuple):
            raise refusal(field, value, why=f"it is a {type(value).__name__}", fix="send a string or a list of parts")
        pieces, num_images = [], 0
        for number, part in enumerate(value):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text":
                pieces.append(require_text(part.get("text"), f"{field}[{number}].text"))
            elif kind in _IMAGE_PARTS and self._roles[index] in _ROLES_WITH_IMAGES:
                pieces.append(self.image_token)
                num_images += 1
            else:
                raise refusal(
                    f"{field}[{number}]",
                    part,
                    why=f"a message of role {self._roles[index]} has no such part",
                    fix="send {'type': 'text', 'text': ...}"
                    + (" or an image_url part" if self._roles[index] in _ROLES_WITH_IMAGES else ""),
                )
        return "\n\n".join(pieces), num_images

    def _with_images(self, index: int) -> tuple[str, dict[str, Any]]:
        from deepseek_recipe import BytesImageSource

        text, num_images = self._content(index)
        if not num_images:
            return text, {}
        # Only the place of an image matters here; its pixels take another way.
        return text, {"image_sources": [BytesImageSource(b"")] * num_images, "image_token": self.image_token}

    # ---- roles --------------------------------------------------------------------------------------------------

    def _system(self, index: int) -> Any:
        from deepseek_recipe import SystemMessage

        text, images = self._with_images(index)
        return SystemMessage(text, **images)

    def _user(self, index: int) -> Any:
        from deepseek_recipe import UserMessage

        text, images = self._with_images(index)
        return UserMessage(text, **images)

    def _tool(self, index: int) -> Any:
        from deepseek_recipe import ToolMessage

        text, images = self._with_images(index)
        return ToolMessage(text, self._messages[index]["tool_call_id"], **images)

    def _reminder(self, index: int) -> Any:
        from deepseek_recipe import LatestReminderMessage

        return LatestReminderMessage(self._content(index)[0])

    def _assistant(self, index: int) -> Any:
        from deepseek_recipe import AssistantMessage

        message = self._messages[index]
        calls = self._tool_calls(index)
        prefix = self.continues_final and index + 1 == len(self._messages)
        reasoning = message.get("reasoning_content")
        if reasoning is not None:
            require_text(reasoning, f"messages[{index}].reasoning_content")
        if prefix and calls:
            raise refusal(
                f"messages[{index}].tool_calls", calls, why="a finished tool call cannot be continued", fix="remove it"
            )
        absent = bool(calls) or (prefix and reasoning is not None)
        return AssistantMessage(self._content(index, may_be_absent=absent)[0], reasoning, calls or None, prefix)

    def _tool_calls(self, index: int) -> list[Any]:
        from deepseek_recipe import ToolCall

        field, calls = f"messages[{index}].tool_calls", self._messages[index].get("tool_calls")
        if calls is None:
            return []
        if not isinstance(calls, list | tuple):
            raise refusal(field, calls, why="it is no list", fix="send a list of tool calls")
        result = []
        for number, call in enumerate(calls):
            here = f"{field}[{number}]"
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping):
                raise refusal(here, call, why="it has no object 'function'", fix="send id, type and function")
            name = require_text(function.get("name"), f"{here}.function.name")
            if not _TOOL_NAME.fullmatch(name):
                raise refusal(
                    f"{here}.function.name",
                    name,
                    why="the tool format cannot spell it",
                    fix="use letters, digits, _ and -",
                )
            arguments = require_text(function.get("arguments"), f"{here}.function.arguments")
            check_arguments(arguments, f"{here}.function.arguments")
            result.append(ToolCall(require_text(call.get("id"), f"{here}.id"), name, arguments))
        return result

    def _check_tool_results(self) -> None:
        """Each tool call has its result right after it, unless the conversation ends with the call."""
        open_ids: set[str] = set()
        for index, role in enumerate(self._roles):
            if role == "tool":
                field, call_id = f"messages[{index}].tool_call_id", self._messages[index].get("tool_call_id")
                if require_text(call_id, field) not in open_ids:
                    raise refusal(
                        field, call_id, why="no open tool call has this id", fix="put the result right after its call"
                    )
                open_ids.remove(call_id)
                continue
            if open_ids:
                raise refusal(
                    f"messages[{index}].role",
                    role,
                    why=f"the tool calls {', '.join(sorted(open_ids))} have no result yet",
                    fix="send their tool messages first",
                )
            if role == "assistant":
                open_ids = {call.id for call in self._tool_calls(index)}


def check_arguments(arguments: str, field: str) -> None:
    """Refuse arguments of an earlier tool call that the tool format cannot spell: it knows no escapes.

    Source: spec 9 (tool format) and the behaviour of the prompt library, which writes values as they are.
    """
    decoded = arguments
    try:
        parsed = json.loads(arguments)
        decoded = json.dumps(parsed, ensure_ascii=False)
    except (ValueError, RecursionError):
        parsed = None  # the prompt format carries what is no JSON object as one text value
    require_text(decoded, field)
    if _CLOSING_MARK in arguments or _CLOSING_MARK in decoded:
        raise refusal(field, arguments, why=f"{_CLOSING_MARK} would end the tool call", fix="remove it from the value")
    for key in parsed if isinstance(parsed, dict) else ():
        if '"' in key or "\n" in key or _MARK in key:
            raise refusal(
                field, arguments, why=f"the tool format cannot spell the name {key!r}", fix="rename that argument"
            )
