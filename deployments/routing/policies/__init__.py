"""Routing policies: one file each, and the names that serve_config.yaml knows them by."""

from __future__ import annotations

from deployments.routing.policies.base import RoutingPolicy
from deployments.routing.policies.least_work import LeastWork
from deployments.routing.policies.lmetric import LMetric
from deployments.routing.policies.power_of_two import PowerOfTwo
from deployments.routing.policies.prefix import Prefix
from deployments.routing.policies.round_robin import RoundRobin
from deployments.routing.policies.session import Session

POLICIES: dict[str, type[RoutingPolicy]] = {
    "prefix": Prefix,
    "least_work": LeastWork,
    "lmetric": LMetric,
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
    "session": Session,
}
"""What ``request_router_kwargs.policy`` may name; the other keys there are the policy's own arguments."""
