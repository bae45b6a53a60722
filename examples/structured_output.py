"""Structured output: the answer is a pydantic model, whatever the language model would like to say.

pip install openai pydantic
"""

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field

URL = os.environ.get("MILLSTREAM_URL", "http://127.0.0.1:8000")


class City(BaseModel):
    name: str = Field(max_length=30)
    country: str = Field(max_length=30)
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]
    is_capital: bool


with OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("MILLSTREAM_API_KEY", "none")) as client:
    reply = client.chat.completions.parse(
        model="",
        messages=[{"role": "user", "content": "Describe the city of Paris as JSON."}],
        response_format=City,
        temperature=0,
    )
    print(repr(reply.choices[0].message.parsed))
