"use strict";
// Two methods on one prompt and seed, each a stream of server-sent events; nothing but what the endpoint offers.
// One begins when the other is done: together they would share the device, and neither would show its speed.

const at = (id) => document.getElementById(id);
const SHOWN = 7; // partial pictures at most: making their pixels takes time as well
const WHY = "fewer steps, but one over drafts takes longer: shorter drafts or a larger model gain more (lantern-hpu race)";
let rows = 16;
let served = {}; // the methods, by name

function headers() {
  const key = at("secret").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

// Until images are taken: what the server does meanwhile, in its own word
async function untilReady() {
  const began = performance.now();
  at("message").className = "";
  for (;;) {
    const answer = await fetch("readyz").catch(() => null);
    if (answer?.ok) break;
    const { status } = answer ? await answer.json() : { status: "not to be reached" };
    const seconds = Math.round((performance.now() - began) / 1000);
    at("message").textContent = `waiting for the server: ${status}, ${seconds} s`;
    await new Promise((done) => setTimeout(done, 1000));
  }
  at("message").textContent = "";
  at("message").className = "error";
  at("go").disabled = false;
}

async function begin() {
  const answer = await fetch("v1/models", { headers: headers() });
  if (answer.status === 401) {
    at("message").textContent = at("secret").value ? "the API key is wrong" : "this server asks for an API key";
    at("key").hidden = false;
    at("form").className = "keyed";
    at("secret").onchange = begin;
    at("secret").focus();
    return;
  }
  if (!answer.ok) {
    at("message").textContent = (await answer.json()).error.message;
    return;
  }
  at("message").textContent = "";
  const model = (await answer.json()).data[0];
  rows = model.rows;
  at("about").textContent = `${model.id}, ${model.size} pixels`;
  served = model.methods;
  const names = Object.keys(served);
  for (const id of ["left", "right"]) {
    at(id).replaceChildren(...names.map((name) => new Option(titleOf(name, model.methods[name]), name)));
  }
  at("right").append(new Option("(none)", ""));
  at("right").selectedIndex = Math.min(1, names.length);
  const relaxed = [...new Set(names.flatMap((name) => served[name].relaxations))];
  at("relax").replaceChildren(new Option("the method's own", ""), ...relaxed.map((name) => new Option(name)));
  at("relaxation").hidden = !relaxed.length;
  at("unrelaxed").hidden = relaxed.length > 0;
  await untilReady();
}

// A fixed schedule is not lossless, and so part of the title.
function titleOf(name, { tree }) {
  const schedule = tree.split(":").find((part) => part.startsWith("commit="));
  return schedule ? `${name}, ${schedule}` : name;
}

function panel(title) {
  const figure = document.createElement("figure");
  figure.innerHTML = `<img hidden alt=""><div class="blank"></div>
    <figcaption><strong></strong><progress max="${rows}" value="0"></progress><dl></dl>
    <div class="bars"></div><small>steps that accepted a draft at depth 1, 2, ...</small><div class="error"></div></figcaption>`;
  const find = (query) => figure.querySelector(query);
  find("strong").textContent = title;
  at("panels").append(figure);
  return {
    show(b64) {
      find("img").src = `data:image/png;base64,${b64}`;
      find("img").hidden = false;
      find(".blank").style.display = "none";
    },
    progress(value) { find("progress").value = value; },
    facts(pairs) {
      find("dl").replaceChildren(...Object.entries(pairs).flatMap(([name, value]) => {
        const [dt, dd] = [document.createElement("dt"), document.createElement("dd")];
        [dt.textContent, dd.textContent, dd.className] = [name, value, name];
        return [dt, dd];
      }));
    },
    bars(counts, steps) {
      find(".bars").replaceChildren(...counts.map((count) => {
        const bar = document.createElement("i");
        bar.style.height = `${(100 * count) / Math.max(steps, 1)}%`;
        return bar;
      }));
    },
    error(text) {
      find("dl").replaceChildren();
      find(".blank").style.display = "none";
      find(".error").textContent = text;
    },
  };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data: "));
      if (data) yield JSON.parse(data.slice(6));
    }
  }
}

// -> seconds from request to picture, and tokens a step; undefined if there is none
async function draw(method, shown, first) {
  const body = {
    prompt: at("prompt").value, seed: Number(at("seed").value), method,
    stream: true, partial_images: Math.max(0, Math.min(rows - 1, SHOWN)),
  };
  const relax = at("relax").value;
  const takes = served[method].relaxations.includes(relax);
  if (takes) body.method = `${method}:${relax}`;
  const notes = relax && !takes ? { relaxation: `${method} is not served with ${relax}` } : {};
  const began = performance.now();
  try {
    const options = { method: "POST", headers: headers(), body: JSON.stringify(body) };
    const response = await fetch("v1/images/generations", options);
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.type === "error") throw new Error(event.error.message);
      const seconds = (performance.now() - began) / 1000;
      const { steps, tokens_per_step: rate } = event.metrics;
      shown.show(event.b64_json);
      const { tv_mean: mean, tv_max: most, tv_sum: sum } = event.metrics;
      const tv = !sum ? {} : { "TV a token": mean.toFixed(3), "largest TV": most.toFixed(3), "sum of TV": sum.toFixed(1) };
      const done = event.type === "image_generation.completed";
      const gain = done && first ? first.seconds / seconds : 0;
      const ratio = gain ? { speed: `${gain.toFixed(2)} times ${first.method}` } : {};
      if (gain && gain < 1.1 && rate > 1.2 * first.rate) ratio.why = WHY;
      if (event.warnings?.length) notes.warning = event.warnings.join("; ");
      shown.facts({ steps, "tokens a step": rate.toFixed(2), seconds: seconds.toFixed(2), ...ratio, ...tv, ...notes });
      if (done) {
        shown.progress(rows);
        shown.bars(event.metrics.accepted_by_depth, steps);
        return { seconds, rate };
      }
      shown.progress(event.rows);
    }
  } catch (error) {
    shown.error(error.message);
  }
}

at("form").onsubmit = async (event) => {
  event.preventDefault();
  at("panels").replaceChildren();
  at("go").disabled = true;
  const methods = [at("left").value, at("right").value].filter(Boolean);
  const panels = methods.map((method) => panel(method));
  panels.slice(1).forEach((shown) => shown.facts({ waits: `until ${methods[0]} is done` }));
  let first = null;
  for (const [i, method] of methods.entries()) {
    const drawn = await draw(method, panels[i], first);
    if (drawn && !first) first = { method, ...drawn };
  }
  at("go").disabled = false;
  document.body.dataset.done = "yes";
};

begin().catch((error) => { at("message").textContent = error.message; });
