"""Prompts of the LlamaIndex adapter: what `get_prompts` shows is what is sent."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_server import ScriptedServer

pytest.importorskip("llama_index.core")

from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate, RichPromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index_kit import (
    QUESTION,
    Given,
    Json,
    Scripted,
    engine,
    is_draft,
    is_fallback,
    nodes,
    synthesizer,
    text_of,
    unknown,
)

from specrag_integrations import (
    ConfigurationError,
    Endpoint,
    Passage,
    RankStratified,
    SpeculativeRAG,
)
from specrag_integrations.llama_index import EndpointLLM, SpeculativeQueryEngine
from specrag_integrations.prompts import draft_messages, draft_request

QA, DRAFT = "response_synthesizer:text_qa_template", "response_synthesizer:draft_template"
ADDED = draft_request(())[0].content
TWO = [Passage(text=f"Fact number {n} is about river {n}.") for n in range(2)]
JOINED = "\n\n".join(passage.text for passage in TWO)


def sent(server: ScriptedServer, **options: Any) -> tuple[list[Json], list[Json]]:
    """Return the messages of the one draft and of the fallback, from two nodes."""
    engine(server, nodes(2), num_drafts=1, **options).query(QUESTION)
    return split(server)


def split(server: ScriptedServer) -> tuple[list[Json], list[Json]]:
    """Return the messages of the draft and of the fallback among what a server received."""
    (draft,) = [body["messages"] for body in server.chats if is_draft(body)]
    (fallback,) = [body["messages"] for body in server.chats if is_fallback(body)]
    return draft, fallback


def test_without_a_prompt_of_the_app_both_defaults_are_used(scripted: Scripted) -> None:
    """Drafts read the core's prompt to the letter; the fallback is what LlamaIndex itself sends."""
    draft, fallback = sent(scripted(unknown))

    assert draft == [turn.to_dict() for turn in draft_messages(QUESTION, TWO)]
    filled = DEFAULT_TEXT_QA_PROMPT_SEL.conditionals[0][1].format_messages(  # type: ignore[index]
        context_str=JOINED, query_str=QUESTION
    )
    assert [turn["content"] for turn in fallback] == [turn.content for turn in filled]
    assert fallback[0]["role"] == "system"


def test_a_calibration_of_the_core_holds_here(server: ScriptedServer) -> None:
    """The default prompts have the same fingerprint; an app's own ones have another."""
    endpoint = Endpoint(server.base_url, "scripted")
    options: Json = {
        "num_drafts": 3,
        "passages_per_draft": 2,
        "partitioner": RankStratified(),
    }
    core = SpeculativeRAG(drafter=endpoint, verifier=endpoint, **options)

    ours = synthesizer(server, **options)
    before = ours.rag.fingerprint()
    ours.update_prompts({"text_qa_template": PromptTemplate("{context_str} {query_str}")})

    assert before == core.fingerprint()
    assert ours.rag.fingerprint().differences(before)[0].startswith("prompts: ")


def test_the_apps_prompt_is_the_fallbacks_and_asks_for_drafts(scripted: Scripted) -> None:
    """The fallback sends the template as it is; a draft adds what a draft must hold."""
    template = PromptTemplate("Be kind.\n{context_str}\nQ: {query_str}")

    draft, fallback = sent(scripted(unknown), text_qa_template=template)

    asked = f"Be kind.\n{JOINED}\nQ: {QUESTION}"
    assert fallback == [{"role": "user", "content": asked}]
    assert draft == [{"role": "user", "content": f"{asked}\n\n{ADDED}"}]


def test_a_fallback_sends_what_the_engine_sent_before(scripted: Scripted) -> None:
    """The request of the app's own engine and that of the fallback hold the same messages."""
    server = scripted(unknown)
    llm = EndpointLLM(Endpoint(server.base_url, "scripted"))
    found = nodes(3, metadata={"page": 7})
    before = RetrieverQueryEngine.from_args(Given(found), llm=llm, streaming=True)

    str(before.query(QUESTION))
    str(SpeculativeQueryEngine.from_engine(before, drafter=llm).query(QUESTION))

    first, *_, last = (body["messages"] for body in server.chats)
    assert first == last


def test_an_own_draft_prompt_gets_numbered_passages(scripted: Scripted) -> None:
    """`draft_template` is sent as it is; its `[n]` count the passages; the fallback stays."""
    template = PromptTemplate("Rationale: and Answer: from\n{context_str}\n{query_str}")

    draft, fallback = sent(scripted(unknown), draft_template=template)

    numbered = f"[1] {TWO[0].text}\n\n[2] {TWO[1].text}"
    assert draft[0]["content"] == f"Rationale: and Answer: from\n{numbered}\n{QUESTION}"
    assert "Rationale" not in fallback[-1]["content"]


def test_prompts_are_shown_and_changed(scripted: Scripted) -> None:
    """Both are in `get_prompts`; an update holds for the next question, and for drafts as well."""
    server = scripted(unknown)
    asked = engine(server, nodes(2), num_drafts=1)
    assert set(asked.get_prompts()) == {QA, DRAFT}
    shown = asked.get_prompts()[DRAFT].format_messages(
        context_str=f"[1] {TWO[0].text}\n\n[2] {TWO[1].text}", query_str=QUESTION
    )
    assert [turn.content for turn in shown] == [
        turn.content for turn in draft_messages(QUESTION, TWO)
    ]

    asked.update_prompts({QA: PromptTemplate("New. {context_str} {query_str}")})
    asked.query(QUESTION)

    draft, fallback = split(server)
    assert fallback[0]["content"] == f"New. {JOINED} {QUESTION}"
    assert draft[0]["content"] == f"New. {JOINED} {QUESTION}\n\n{ADDED}"
    shown = asked.get_prompts()[DRAFT].format_messages(context_str="c", query_str="q")
    assert [turn.content for turn in shown] == [f"New. c q\n\n{ADDED}"]
    assert asked.get_prompts()[DRAFT].get_template().endswith(ADDED)
    assert asked.get_prompts()[DRAFT].format(context_str="c", query_str="q").endswith(ADDED)


def test_what_is_shown_can_be_given_back(scripted: Scripted) -> None:
    """Updating with what `get_prompts` returned changes nothing that is sent."""
    server, template = scripted(unknown), PromptTemplate("Mine. {context_str} {query_str}")
    before = sent(server, text_qa_template=template)
    server.reset()

    asked = engine(server, nodes(2), num_drafts=1, text_qa_template=template)
    asked.update_prompts(asked.get_prompts())
    asked.query(QUESTION)

    assert split(server) == before


@pytest.mark.parametrize(
    "template", [None, PromptTemplate("One. {context_str} {query_str}")], ids=["default", "own"]
)
def test_what_is_given_back_goes_on_following_the_apps_prompt(
    scripted: Scripted, template: PromptTemplate | None
) -> None:
    """A draft prompt that is made of the other one is not frozen; one of the app's own stays."""
    server = scripted(unknown)
    asked = engine(server, nodes(2), num_drafts=1, text_qa_template=template)
    two = PromptTemplate("Two. {context_str} {query_str}")
    mine = PromptTemplate("Mine, Rationale: and Answer: {context_str} {query_str}")

    asked.update_prompts({**asked.get_prompts(), QA: two})
    asked.query(QUESTION)
    draft, _ = split(server)
    server.reset()
    asked.update_prompts({DRAFT: mine})
    asked.update_prompts({**asked.get_prompts(), QA: PromptTemplate("Three. {context_str}")})
    asked.query(QUESTION)
    own, fallback = split(server)

    assert draft[0]["content"].startswith("Two. ")
    assert own[0]["content"].startswith("Mine, ")
    assert fallback[0]["content"].startswith("Three. ")


def mapped(**given: Any) -> str:
    """Show the context in a way of its own."""
    return f"<<{given['context_str']}>>"


RICH = """
{% chat role="system" %}Be {{ tone }}.{% endchat %}
{% chat role="user" %}{{ context_str }} Q: {{ query_str }}{% endchat %}
"""
TURNS = [("system", "Be {tone}."), ("user", "{context_str} Q: {query_str}")]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            PromptTemplate("Be {tone}. {context_str} Q: {query_str}").partial_format(tone="kind"),
            [f"Be kind. {JOINED} Q: {QUESTION}"],
        ),
        (
            PromptTemplate(
                "{context_str} Q: {query_str}", function_mappings={"context_str": mapped}
            ),
            [f"<<{JOINED}>> Q: {QUESTION}"],
        ),
        (
            PromptTemplate(
                "{docs} Q: {q}", template_var_mappings={"context_str": "docs", "query_str": "q"}
            ),
            [f"{JOINED} Q: {QUESTION}"],
        ),
        (
            RichPromptTemplate(RICH).partial_format(tone="kind"),
            ["Be kind.", f"{JOINED} Q: {QUESTION}"],
        ),
        (
            ChatPromptTemplate.from_messages(TURNS).partial_format(tone="kind"),
            ["Be kind.", f"{JOINED} Q: {QUESTION}"],
        ),
    ],
    ids=["partial", "function", "renamed", "rich", "chat"],
)
def test_every_kind_of_template_is_taken(
    scripted: Scripted, template: Any, expected: list[str]
) -> None:
    """Partial, function-mapped, renamed, rich and chat templates are filled by LlamaIndex."""
    server = scripted(unknown)
    asked = engine(server, nodes(2), num_drafts=1)

    asked.update_prompts({QA: template})
    asked.query(QUESTION)

    draft, fallback = split(server)
    assert [turn["content"] for turn in fallback] == expected
    assert [turn["content"] for turn in draft[:-1]] == expected[:-1]
    assert draft[-1]["content"] == f"{expected[-1]}\n\n{ADDED}"


def test_a_draft_prompt_can_be_filled_in_part(scripted: Scripted) -> None:
    """The one that was made of an app's prompt passes variables on to it."""
    template = PromptTemplate("Be {tone}. {context_str} {query_str}")
    shown = synthesizer(scripted(unknown), text_qa_template=template).get_prompts()

    filled = shown["draft_template"].partial_format(tone="kind")

    assert filled.format(context_str="c", query_str="q") == f"Be kind. c q\n\n{ADDED}"


def test_a_prompt_that_cannot_work_changes_nothing(scripted: Scripted) -> None:
    """An update that is refused leaves the prompts as they were."""
    server = scripted(unknown)
    asked = engine(server, nodes(2), num_drafts=1)
    pictured = ChatPromptTemplate(
        [
            ChatMessage(
                role="user", blocks=[TextBlock(text="{context_str}"), ImageBlock(url="http://a/b")]
            )
        ]
    )
    tool_turn = ChatPromptTemplate([ChatMessage(role="tool", content="{context_str}")])

    for template, told in [
        (PromptTemplate("{query_str}"), "does not show the passages"),
        (pictured, "a turn holds ImageBlock"),
        (tool_turn, "a turn of a 'tool' cannot be sent"),
    ]:
        with pytest.raises(ConfigurationError, match=told):
            asked.update_prompts({QA: template})
    asked.query(QUESTION)

    _, fallback = split(server)
    assert fallback[0]["role"] == "system"


def test_prompts_of_other_parts_are_left_alone(server: ScriptedServer) -> None:
    """Keys that are not ours are ignored, as LlamaIndex passes all of them on."""
    answering = synthesizer(server)
    before = answering.get_prompts()

    answering.update_prompts({"refine_template": PromptTemplate("{existing_answer}")})

    assert answering.get_prompts() == before


def test_braces_in_a_document_are_not_filled_in(scripted: Scripted) -> None:
    """A passage that holds a variable's name is shown as it is."""
    server = scripted(unknown)
    found = nodes(2)
    found[0].node.set_content("Fact number 0: {query_str} and {context_str} are braces {}.")

    engine(server, found, num_drafts=1).query(QUESTION)

    assert all("{query_str} and {context_str} are braces {}" in text_of(b) for b in server.chats)
