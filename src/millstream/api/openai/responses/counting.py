"""Counts the tokens of an input, as a response to it would."""

from __future__ import annotations

from millstream.api.openai.responses.context import resolve
from millstream.api.openai.responses.mcp import McpCalls, check_labels
from millstream.api.openai.responses.request import Plan
from millstream.api.openai.responses.stored import StoredResponses
from millstream.service.ports import Services


async def count_input(services: Services, stored: StoredResponses, plan: Plan) -> int:
    check_labels(plan.tools.servers, services.tool_servers.labels)
    context = await resolve(plan, stored, services.seal)
    catalog, _ = await McpCalls(services.tool_servers, None).list_tools(plan.tools)
    tools = plan.choice.tool_use(catalog, parallel=plan.request.parallel_tool_calls)
    messages = context.messages(plan.request.instructions, (), services.seal)
    return await services.generation.count_tokens(plan.generation(messages, tools))
