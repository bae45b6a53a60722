"""An agent with tools, by openai-agents over the Responses API.

Needs a model that knows tools, such as Qwen3: the demo model does not.

pip install openai-agents
"""

import asyncio
import os

from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

URL = os.environ.get("MILLSTREAM_URL", "http://127.0.0.1:8000")


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    print(f"weather({city!r})")
    return f"20 degrees and sunny in {city}"


async def main() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("MILLSTREAM_API_KEY", "none")) as client:
        name = (await client.models.list()).data[0].id
        agent = Agent(
            name="Miller",
            instructions="Answer briefly.",
            tools=[weather],
            model=OpenAIResponsesModel(name, client),
        )
        # Without this, the library would send traces to OpenAI.
        quiet = RunConfig(tracing_disabled=True)
        result = await Runner.run(agent, "How is the weather in Oslo?", run_config=quiet)
    print(result.final_output)


asyncio.run(main())
