//! The answers of `xentile_plan`: plans of the library's calls, and what a call takes by its plan.

use serde::{Deserialize, Serialize};
use xentile::linear_cross_entropy::plan::{CallPlan, CpuLimits, Plan, Problem, cuda};
use xentile_cpu::linear_cross_entropy::plan as cpu;

/// A request, by its platform: with `limits` for a plan, with `call` for a call by a plan.
#[derive(Deserialize)]
#[serde(tag = "platform", rename_all = "lowercase")]
enum Request {
    Cpu { dtype: String, problem: Problem, limits: Option<CpuLimits>, call: Option<Call> },
    Cuda { problem: Problem, limits: Option<cuda::Limits>, call: Option<Call> },
}

#[derive(Deserialize)]
struct Call {
    pass: String,
    plan: Plan,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    Plan(Option<Plan>),
    Call(CallPlan),
    Error(String),
}

/// Returns the answer to a request, both JSON; include/xentile_xla.h documents their keys.
#[must_use]
pub fn answer(request: &str) -> String {
    // A size that overflows panics, and the answer is an error like any other.
    let found = std::panic::catch_unwind(|| compute(request))
        .unwrap_or_else(|_| Err("the sizes are too large to plan for".into()));
    let answer = found.unwrap_or_else(|error| Answer::Error(error.to_string()));
    serde_json::to_string(&answer).expect("an answer is numbers and text")
}

fn compute(request: &str) -> Result<Answer, Box<dyn std::error::Error + Send + Sync>> {
    Ok(match serde_json::from_str(request)? {
        Request::Cpu { dtype, problem, call: Some(Call { pass, plan }), .. } => {
            Answer::Call(cpu::plan_call(&problem, dtype.parse()?, &plan, &pass)?)
        }
        Request::Cpu { dtype, problem, limits: Some(limits), .. } => {
            Answer::Plan(cpu::plan(&problem, dtype.parse()?, &limits)?)
        }
        Request::Cuda { problem, call: Some(Call { pass, plan }), .. } => {
            Answer::Call(cuda::plan_call(&problem, &plan, &pass))
        }
        Request::Cuda { problem, limits: Some(limits), .. } => {
            Answer::Plan(cuda::plan(&problem, &limits))
        }
        _ => return Err("a request has `limits` or `call`".into()),
    })
}
