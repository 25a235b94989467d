"""Ray's own prefix router behind our ingress, for comparison."""

from __future__ import annotations

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve.request_router import PendingRequest

from deployments.messages import GenerateCall


class PrefixAffinity(PrefixCacheAffinityRouter):
    """It looks for text in a request, and divides by its length; our calls have token ids. So here is a text with one
    character for each token, of which equal prefixes are equal. All else is Ray's."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        call = pending_request.args[0] if pending_request.args else None
        if not isinstance(call, GenerateCall):
            return "a call of another method"
        return call.prompt.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
