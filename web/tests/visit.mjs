// Uses the exported page in headless Chromium, as a reader would, and prints what it saw as JSON.
//
//     node web/tests/visit.mjs PLAN        PLAN, as JSON: see test_web.py
//
import { createRequire } from "node:module";

const { chromium } = createRequire(new URL("../package.json", import.meta.url))("playwright-core");
const plan = JSON.parse(process.argv[2]);
const args = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"];
const browser = await chromium.launch({ executablePath: plan.chromium, args });
const seen = { requests: [], complaints: [] };

/** Open the page, wait until it has loaded, and return what `work` returns. */
async function visit(url, work, options = {}) {
  const page = await browser.newPage({ viewport: { width: 1280, height: 720 }, reducedMotion: "reduce", ...options });
  page.on("request", (request) => seen.requests.push(request.url()));
  page.on("pageerror", (error) => seen.complaints.push(`uncaught: ${error}`));
  page.on("console", (line) => ["error", "warning"].includes(line.type()) && seen.complaints.push(line.text()));
  await page.goto(url);
  await idle(page);
  await speed(page, 100);
  const result = await work(page);
  await page.close();
  return result;
}

/** 100 is as fast as possible, and 28 is four characters per second. */
async function speed(page, value) {
  await page.evaluate((value) => {
    document.getElementById("speed").value = value;
    document.getElementById("speed").dispatchEvent(new Event("input"));
  }, value);
}

/** Wait until the page is waiting for the reader. */
async function idle(page) {
  await page.waitForFunction(() => !["loading", "preparing", "running"].includes(document.body.dataset.state));
  await drawn(page);
}

async function fill(page, values) {
  await page.evaluate(() => (document.getElementById("settings").open = true));
  for (const [name, value] of Object.entries(values)) await page.locator(`[name=${name}]`).fill(value);
  await page.keyboard.press("Escape"); // closes the settings
}

/** Wait until the newest state has been drawn. */
async function drawn(page) {
  await page.evaluate(() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve))));
}

/** Return what the reader sees, once the page is idle. */
async function result(page) {
  await idle(page);
  return page.evaluate(() => {
    const text = (id) => document.getElementById(id).textContent.trim().replace(/\s+/g, " ");
    return {
      text: document.getElementById("text").textContent,
      status: text("status"),
      message: text("message"),
      about: text("about"),
      ends: ["end-0", "end-1"].map(text),
      rows: ["rows-off", "rows-on"].map((id) => Number(text(id).replaceAll(",", ""))),
      factor: text("factor"),
      name: text("next-name"),
      next: [...document.querySelectorAll("#next li")].map((item) => item.textContent),
      state: document.body.dataset.state,
      focus: document.activeElement.name || document.activeElement.id,
      disabled: document.getElementById("run").disabled,
      address: location.search,
    };
  });
}

async function run(page, values) {
  await fill(page, values);
  await page.click("#run");
  return result(page);
}

async function step(page, number) {
  await page.click(`nav a >> nth=${number - 1}`);
  await page.waitForFunction((number) => document.body.dataset.step === String(number), number);
  await idle(page);
}

/** Return the text of an element, once it has some. */
async function said(page, selector) {
  await page.waitForFunction((selector) => document.querySelector(selector)?.textContent, selector);
  await drawn(page);
  return page.locator(selector).first().textContent();
}

// the text of each job, and a mistake in the form
await visit(plan.site, async (page) => {
  seen.jobs = [];
  for (const job of plan.jobs) seen.jobs.push(await run(page, job));
  seen.mistyped = await run(page, { prompt: plan.mistyped });
  seen.mended = await run(page, plan.jobs[0]);
});

// what the worker computes and what the stage draws, as numbers
seen.answers = await visit(plan.site, (page) =>
  page.evaluate(async ({ prompt, steps, sampling, column, position, changed, mistakes }) => {
    const { startWorker } = await import("./client.js");
    const { keptColumns } = await import("./columns.js");
    const { attend } = await import("./attention.js");
    const { whoseTurn } = await import("./generate.js");
    const on = [];
    const worker = startWorker((event, data) => event === "step" && on.push(data.on));
    const info = await worker.call("about");
    await worker.call("load");
    await worker.call("begin", 1, prompt, steps, { ...sampling, seed: BigInt(sampling.seed) });
    await worker.call("advance", Infinity);
    const kept = keptColumns(info);
    for (const { columns } of on) kept.add(columns);

    const lists = (arrays) => arrays.map((array) => [...array]);
    const layers = [...Array(info.n_layer).keys()];
    const heads = [...Array(info.n_head).keys()];
    const answers = {
      on: on.map(({ id }) => id),
      probabilities: on.map(({ probabilities }) => probabilities),
      kept: layers.map((layer) => [0, 1].map((kind) => lists([0, 1].map((head) => kept.lane(layer, kind, head))))),
      attention: layers.map((layer) =>
        heads.map((head) => {
          const query = on.at(-1).queries[layer].subarray(head * info.head_size, (head + 1) * info.head_size);
          const serving = Math.floor((head * info.n_kv_head) / info.n_head);
          const { weights, mix } = attend(query, kept.lane(layer, 0, serving), kept.lane(layer, 1, serving));
          return [weights, [...mix]];
        }),
      ),
      mistakes: {},
    };
    const takeOut = async (columns) => {
      const { masked, moved, probabilities, next } = await worker.call("takeOut", columns);
      return { masked, moved, probabilities, next };
    };
    answers.taken = await takeOut([column]);
    answers.most = await takeOut([...Array(prompt.length + steps - 2).keys()]);
    const change = await worker.call("change", position, changed);
    answers.change = { differences: lists(change.differences), probabilities: change.probabilities, next: change.next };
    answers.guess = await worker.call("guess");
    for (const name of mistakes) {
      const { columns, queries, differences, ...mistake } = await worker.call("mistake", name);
      answers.mistakes[name] = { ...mistake, differences: lists(differences), columns: columns[0].length / 2 / info.head_size };
    }
    const [ahead, slow] = [{ ids: [0, 1], ms: 1 }, { ids: [0], ms: 5 }];
    answers.turns = [false, true].map((racing) => whoseTurn({ on: ahead, off: slow, total: 3 }, racing));
    answers.turns.push(whoseTurn({ on: { ids: [0, 1, 2], ms: 1 }, off: slow, total: 3 }, true));

    // back to the prompt or a few steps, and the same text again
    answers.again = [];
    for (const left of [0, 5]) {
      on.length = left;
      await worker.call("rewind", left);
      await worker.call("advance", Infinity, { hurrying: true });
      answers.again.push(on.map(({ id, rows }) => [id, rows]));
    }
    return answers;
  }, plan.questions),
);

// the stage: characters that are marked, and the steps of the lesson
await visit(plan.site, async (page) => {
  await run(page, { ...plan.jobs[0], max_new_tokens: "24" });
  seen.stage = { marked: [], boxes: [] };
  const box = async () => {
    const boxes = await page.evaluate(() =>
      ["strip", "next", "form"].map((id) => {
        const { x, y, bottom } = document.getElementById(id).getBoundingClientRect();
        return [x, y + scrollY, bottom + scrollY];
      }),
    );
    seen.stage.boxes.push(boxes);
  };
  await box();
  await page.click("#layer label >> nth=0");
  await page.click("#head label >> nth=0");
  await page.locator("#cells button").nth(plan.marked).hover();
  seen.stage.marked.push(await result(page));
  await page.locator("#text span").nth(plan.marked).hover();
  seen.stage.marked.push(await result(page));
  await page.mouse.move(1, 1);
  seen.stage.unmarked = await result(page);

  await page.click("#take");
  seen.stage.taken = [await said(page, "#take-verdict"), await result(page)];
  await page.locator("#cells button").nth(2).click();
  await page.waitForFunction(() => document.getElementById("take-verdict").textContent.includes("column 3,"));
  seen.stage.clicked = await said(page, "#take-verdict");
  await step(page, 2);
  await box();
  seen.stage.prepared = await result(page);
  await page.click("#back");
  await page.click("#back");
  seen.stage.back = await result(page);

  await step(page, 3);
  await page.click("[data-guess=right]");
  seen.stage.change = [await said(page, "#change-verdict"), await result(page)];
  await page.click("#layer label >> nth=0");
  await page.waitForFunction(() => document.getElementById("change-verdict").textContent.includes("layer 1"));
  seen.stage.change.push(await said(page, "#change-verdict"), await result(page));
  await box();
  for (const letter of "abcdefgabcdefgabcdefgabc") await page.locator("#changed").selectOption(letter);
  await page.locator("#changed").selectOption("q");
  await page.waitForFunction(() => document.getElementById("text").textContent.includes("q"));
  seen.stage.changeLast = await result(page);
  await page.locator("#text .wrong").hover();
  seen.stage.changeAbout = await said(page, "#about");
  await page.mouse.move(1, 1);
  await page.click("#unchange");
  seen.stage.unchanged = await result(page);

  await step(page, 4);
  await mistakes(page);
  seen.stage.mistakes = {};
  for (const name of plan.questions.mistakes) {
    await page.locator(`[value="${name}"]`).check({ force: true });
    seen.stage.mistakes[name] = [await said(page, "#mistake-verdict"), await page.locator("#bug").textContent()];
  }
  seen.stage.right = await page.locator("#text span").evaluateAll((each) => each.map(({ dataset }) => dataset.right));
  await box();
  await page.click("footer summary >> text=Guess ahead");
  await page.click("#guess");
  seen.stage.guess = await said(page, "#guess-verdict");

  await step(page, 5);
  seen.stage.scale = [await said(page, "#scale-token"), await said(page, "#scale-text")];
  await page.locator("#scale-heads").fill("32");
  seen.stage.scale.push(await said(page, "#scale-token"));
  await page.locator("#scale-model").selectOption("Llama 3 70B");
  seen.stage.scale.push(await said(page, "#scale-sharing"));
  await page.locator("#scale-tokens").fill("");
  seen.stage.scale.push(await page.locator("#scale-result").isVisible());
  await step(page, 1);
  seen.stage.again = await result(page);
});

/** Wait until all mistakes have an answer. */
async function mistakes(page) {
  await page.waitForFunction(() => [...document.querySelectorAll("#mistakes small")].every((each) => each.textContent));
  await drawn(page);
}

// where the labels are while the model is loading, and afterwards; and what the first picture shows
{
  const page = await browser.newPage({ viewport: { width: 1280, height: 720 } });
  const places = () =>
    page.locator(".name, .end, form").evaluateAll((labels) =>
      labels.filter((each) => each.innerText).map((each) => [each.innerText[0], each.getBoundingClientRect().y]),
    );
  let arrive;
  const arrived = new Promise((resolve) => (arrive = resolve));
  await page.route("**/model.onnx.gz", async (route) => {
    await arrived;
    await route.continue();
  });
  const picture = async () => {
    await said(page, "#take-verdict");
    return page.evaluate(() => ["text", "take-verdict", "next"].map((id) => document.getElementById(id).textContent));
  };
  await page.goto(plan.site);
  await page.locator("#cells .fresh").waitFor();
  await drawn(page);
  seen.labels = [await places()];
  await page.click("#take"); // before the model has arrived
  seen.opening = [await picture()];
  arrive();
  await idle(page);
  seen.opening.push(await picture());
  await page.click("#take");
  await drawn(page);
  seen.labels.push(await places());
  await page.close();
}

// what is above the fold on small laptops, and on a projector
seen.folds = [];
for (const [width, height, query] of plan.folds) {
  const look = async (page) => {
    for (const number of [1, 2, 3, 4]) {
      await step(page, number);
      const ends = (each) => each.map((it) => it.getBoundingClientRect().bottom);
      seen.folds.push(Math.max(...(await page.locator("#row-1, #next, .go").evaluateAll(ends))));
    }
    await step(page, 2);
    const sizes = (each) => each.map((it) => parseFloat(getComputedStyle(it).fontSize));
    const labels = page.locator("#earlier, #asking, #end-1, #next-name");
    return [await page.locator("#cells button").count(), ...(await labels.evaluateAll(sizes))];
  };
  seen.projector = await visit(plan.site + query, look, { viewport: { width, height } });
}

// step by step, paused and continued; another prompt while it runs; races
await visit(plan.site + "#step-2", async (page) => {
  const longer = (count) =>
    page.waitForFunction((count) => document.getElementById("text").children.length > count, count);
  const { prompt } = plan.jobs[0];
  await fill(page, { prompt: "O" });
  await fill(page, plan.jobs[0]);
  seen.steps = [];
  for (let i = 0; i < 3; i++) {
    await page.click("#one");
    seen.steps.push(await result(page));
  }
  await speed(page, 28);
  await page.click("#run");
  await longer(prompt.length + 5);
  await page.click("#run");
  seen.paused = await result(page);
  await speed(page, 100);
  await page.click("#run");
  seen.goneOn = await result(page);

  await page.click("[data-times='8']");
  await page.click("[data-times='40']");
  seen.race = await result(page);
  seen.race.said = await page.locator("#time-off, #time-on, #speeds").allTextContents();
  await page.click("#run");
  seen.afterRace = await result(page);

  await speed(page, 28);
  await page.click("#run");
  await longer(prompt.length + 2);
  await page.locator("[name=prompt]").fill("Dead Caesar");
  seen.edited = await result(page);
  await speed(page, 100);
  await page.click("#run");
  seen.afterEdit = await result(page);

  // a click on an early character while it runs and the strip has moved
  await page.setViewportSize({ width: 700, height: 700 });
  await speed(page, 56);
  await page.locator("[name=prompt]").fill("Dead Caesar!");
  await page.click("#run");
  await page.waitForFunction(() => document.getElementById("earlier").textContent);
  await page.locator("#text span").first().click();
  seen.turned = await result(page);
});

// a race in which a step without the cache takes nine times as long, and a pause gives each step its own frame: the
// lights in every frame, and whether the way to the next step shows
{
  const page = await browser.newPage({ viewport: { width: 1280, height: 720 } });
  await page.route("**/generate.js", async (route) => {
    const response = await route.fetch();
    const slowed = 'text.ms += name === "off" ? 9 : 1; await new Promise((resolve) => setTimeout(resolve, 20));';
    const body = (await response.text()).replace("text.ms += ms;", slowed);
    await route.fulfill({ response, body });
  });
  await page.goto(`${plan.site}#step-2`);
  await idle(page);
  await page.evaluate(() => {
    window.lit = [];
    let wasRunning = false; // the first frame of a race still shows what was there before
    const watch = () => {
      const lit = [0, 1].map((row) => document.querySelectorAll(`#row-${row} .lit, #row-${row} .kept`).length);
      const next = !document.getElementById("next-step").hidden;
      const running = document.body.dataset.state === "running";
      const began = wasRunning && document.getElementById("rows-off").textContent !== "0";
      if (began && running) window.lit.push([...lit, next]);
      wasRunning = running;
      requestAnimationFrame(watch);
    };
    watch();
  });
  await page.click("[data-times='8']");
  await idle(page);
  seen.lit = await page.evaluate(() => window.lit);
  await page.close();
}

// past bugs: nothing is computed yet, or the form has a mistake
seen.past = {};
await visit(plan.site, async (page) => {
  await fill(page, { prompt: "A cab" });
  await idle(page);
  const disabled = () => page.evaluate(() => ["take", "back", "run"].map((id) => document.getElementById(id).disabled));
  seen.past.edited = await disabled();
  await page.click("#one");
  await idle(page);
  seen.past.stepped = await disabled();
});
await visit(plan.site + "?temperature=abc#step-4", async (page) => {
  await page.waitForFunction(() => document.getElementById("message").textContent);
  seen.past.mistyped = await result(page);
  await page.locator("[name=temperature]").fill("0.8");
  await mistakes(page);
  seen.past.mended = await result(page);
  await page.locator("[name=prompt]").fill("A#");
  seen.past.unknown = await result(page);
  await page.locator("[name=prompt]").fill("A cab, ");
  await mistakes(page);
  await page.waitForFunction(() => location.search.includes("cab"));
  await page.reload();
  await idle(page);
  await mistakes(page);
  seen.past.reloaded = await result(page);
});
await visit(plan.site + "#step-3", async (page) => {
  await page.click("[data-guess=all]");
  seen.past.straight = await said(page, "#change-verdict");
  await page.click("#unchange");
  await idle(page);
  await page.setViewportSize({ width: 320, height: 600 }); // too low for all lines of the text
  await page.evaluate(() => (document.documentElement.style.fontSize = "300%"));
  await drawn(page);
  await drawn(page);
  seen.past.scrolled = await page.evaluate(() => {
    const [pane, newest] = ["#text", "#text .fresh"].map((each) => document.querySelector(each).getBoundingClientRect());
    return document.getElementById("text").scrollTop > 0 && newest.top >= pane.top && newest.bottom <= pane.bottom;
  });
});

// the browser's Back button returns to the moment, not just to the address
await visit(plan.site + "#step-3", async (page) => {
  const where = () => page.evaluate(() => [document.body.dataset.step, location.search]);
  await page.click("[data-guess=all]");
  await said(page, "#change-verdict");
  await page.waitForFunction(() => location.search.includes("change="));
  const before = await where();
  await page.click('nav a[href="#step-4"]');
  await page.waitForFunction(() => document.body.dataset.step === "4" && location.search.includes("mistake="));
  await page.goBack();
  await page.waitForFunction(() => document.body.dataset.step === "3" && location.search.includes("change="));
  seen.past.back = [before, await where(), await said(page, "#change-verdict")];
});

// links to moments, and what their addresses become
seen.moments = [];
for (const address of plan.moments) {
  await visit(plan.site + address, async (page) => {
    if (address.includes("mistake")) await mistakes(page);
    const query = new URLSearchParams(address.split("#")[0]);
    for (const name of ["take", "change"]) if (query.has(name)) await said(page, `#${name}-verdict`);
    await page.waitForTimeout(400); // the address changes a little later
    const { text } = await result(page);
    const chosen = page.locator(".segments :checked, #mistakes :checked");
    const look = await chosen.evaluateAll((each) => each.map(({ value }) => value));
    seen.moments.push([await page.evaluate(() => location.search + location.hash), text.length, look]);
  });
}

// with the keyboard only
await visit(plan.site, async (page) => {
  const press = async (key, times = 1) => {
    for (let i = 0; i < times; i++) await page.keyboard.press(key);
  };
  const focus = async (selector) => {
    for (let i = 0; i < 40; i++) {
      if (await page.evaluate((selector) => document.activeElement.matches(selector), selector)) return;
      await press("Tab");
    }
  };
  await focus("[name=prompt]");
  await press("Control+A");
  await page.keyboard.type("Abe, ");
  await press("Enter");
  seen.keyboard = { run: await result(page) };
  await focus("#cells button");
  await press("Home");
  await press("ArrowRight", 2);
  seen.keyboard.marked = await result(page);
  await press("End");
  seen.keyboard.end = await result(page);
  await press("ArrowLeft", 3);
  await press("Enter");
  seen.keyboard.taken = await said(page, "#take-verdict");
});

// the address, opened by another reader
await visit(plan.site, async (page) => {
  await run(page, plan.jobs[3]);
  await page.waitForFunction(() => location.search.includes("seed"));
  const { address } = await result(page);
  seen.linked = await visit(plan.site + address, (page) => run(page, {}));
});

// readers with different needs: does the page play by itself, does it fit, and can they see what is on it?
seen.readers = {};
for (const [name, { textSize = 100, ...options }] of Object.entries(plan.readers)) {
  const look = async (page) => {
    const state = await page.evaluate(() => document.body.dataset.state);
    await page.evaluate((size) => (document.documentElement.style.fontSize = size), textSize === 100 ? "" : `${textSize}%`);
    await run(page, { ...plan.jobs[0], max_new_tokens: "12" });
    const widths = [];
    for (const number of [1, 2, 3, 4]) {
      await step(page, number);
      await drawn(page);
      widths.push(await page.evaluate(() => document.documentElement.scrollWidth));
    }
    await step(page, 2);
    await drawn(page);
    return page.evaluate(
      ([state, widths]) => {
        const run = getComputedStyle(document.getElementById("run"));
        const fed = document.querySelectorAll("#cells button:enabled").length;
        const light = (i, row) => getComputedStyle(document.getElementById(`row-${row}`).children[i]).backgroundColor;
        return {
          state,
          width: Math.max(...widths),
          colours: [run.color, run.backgroundColor],
          page: [getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor],
          newest: [light(fed - 1, 0), light(fed - 1, 1)],
          before: [light(fed - 2, 0), light(fed - 2, 1)],
          ring: getComputedStyle(document.getElementById("row-1").children[fed - 2]).borderTopColor,
          keys: document.getElementById("keys").getBoundingClientRect().y + scrollY,
        };
      },
      [state, widths],
    );
  };
  seen.readers[name] = await visit(plan.site, look, options);
}

await browser.close();
console.log(JSON.stringify(seen));
