"""Tool calls: the model asks for a function, the program runs it and sends the result back.

Needs a model that knows tools, such as Qwen3: the demo model does not.

pip install openai
"""

import json
import os

from openai import OpenAI

URL = os.environ.get("MILLSTREAM_URL", "http://127.0.0.1:8000")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def weather(city: str) -> str:
    return f"20 degrees and sunny in {city}"


messages = [{"role": "user", "content": "How is the weather in Oslo?"}]
with OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("MILLSTREAM_API_KEY", "none")) as client:
    while True:
        message = client.chat.completions.create(model="", messages=messages, tools=TOOLS).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            print(f"{call.function.name}({arguments})")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": weather(**arguments)})
    print(message.content)
