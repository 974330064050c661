"""The agent of shop_openai.py, written for pydantic-ai, which calls the tool by itself."""

from openai import AsyncOpenAI
from pydantic_ai import Agent, RunContext
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

shop = Agent(deps_type=dict)


@shop.tool
def price(context: RunContext[dict], item: str) -> str:
    """What an item costs."""
    return str(context.deps["price"]) if item == context.deps["item"] else "none"


async def run(task, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
        try:
            result = await shop.run(task["question"], model=model, deps=task,
                                    usage_limits=UsageLimits(request_limit=2))
        except (UnexpectedModelBehavior, UsageLimitExceeded):  # the policy's fault, which an error would hide
            return 0.0
    return float(result.output.endswith(f"= {task['answer']}"))
