"""A prompt, a model and a parser, chained with LangChain.

pip install langchain-openai
"""

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

URL = os.environ.get("MILLSTREAM_URL", "http://127.0.0.1:8000")

model = ChatOpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("MILLSTREAM_API_KEY", "none"), model="", temperature=0)
prompt = ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")])
chain = prompt | model | StrOutputParser()
for piece in chain.stream({"country": "France"}):
    print(piece, end="", flush=True)
print()
